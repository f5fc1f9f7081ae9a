"""Adapters as PEFT means them, wherever they lie and whoever shares the batch."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.adapters.digest import adapter_digest, digest_of
from engine.backends.layers.lora import LoraStack
from engine.backends.layers.matrices import SITE_OF
from engine.batch import AdapterHandle
from engine.errors import AdapterError, IntegrityError
from tests.engine.checkpoints import (
    adapted_reference,
    reference,
    reference_greedy,
    save_adapter,
    save_checkpoint,
)
from tests.engine.driver import Driver, Sequence

PROMPT = [5, 9, 12, 40, 33, 71, 8]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"lora_alpha": 3},
        {"targets": ["q_proj", "v_proj"]},
        {"targets": r"model\.layers\.[01]\.(self_attn\.o_proj|mlp\.up_proj)"},
        {"rank_pattern": {"down_proj": 3, "layers.1.self_attn.q_proj": 9}},
        {"alpha_pattern": {"gate_proj": 20}},
    ],
)
def test_every_kind_of_peft_scaling_and_target(
    base: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    adapter = save_adapter(base, tmp_path, rank=6, seed=4, **changes)
    driver = Driver(base)
    sequence = driver.sequence(PROMPT, adapter=driver.adapter(adapter, 0))
    driver.run([sequence], chunk=4, count=10)
    expected = reference_greedy(adapted_reference(base, adapter), PROMPT, 10)
    assert sequence.output == expected
    assert expected != reference_greedy(reference(base), PROMPT, 10)


def test_the_digest_is_of_weights_and_scaling(base: Path, tmp_path: Path) -> None:
    paths = [
        save_adapter(base, tmp_path / name, rank=4, seed=seed, lora_alpha=alpha)
        for name, seed, alpha in (("a", 1, 8), ("b", 1, 8), ("alpha", 1, 9), ("seed", 2, 8))
    ]
    digests = [adapter_digest(path) for path in paths]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
    plain = {"r": 4, "lora_alpha": 8}
    unset = {"use_dora": False, "modules_to_save": None, "target_parameters": []}
    assert digest_of(plain, b"w") == digest_of(plain | unset, b"w")
    assert digest_of(plain, b"w") != digest_of(plain | {"use_dora": True}, b"w")


def test_nothing_of_an_adapter_stays_in_the_slot_it_left(base: Path, tmp_path: Path) -> None:
    driver = Driver(base)
    whole = save_adapter(base, tmp_path / "whole", rank=6, seed=4)
    some = save_adapter(base, tmp_path / "some", rank=6, seed=5, targets=["q_proj", "down_proj"])
    driver.runner.unload_adapter(driver.adapter(whole, 0))
    sequence = driver.sequence(PROMPT, adapter=driver.adapter(some, 0))
    driver.run([sequence], chunk=4, count=10)
    assert sequence.output == reference_greedy(adapted_reference(base, some), PROMPT, 10)


def test_a_stale_handle_stops_the_step(base: Path, tmp_path: Path) -> None:
    driver = Driver(base)
    old = driver.adapter(save_adapter(base, tmp_path / "a", 4, 1), 0)
    driver.runner.unload_adapter(old)
    new = driver.adapter(save_adapter(base, tmp_path / "b", 4, 2), 0)
    with pytest.raises(IntegrityError, match="slot 0"):
        driver.step((driver.sequence(PROMPT, adapter=old), 0))
    with pytest.raises(IntegrityError, match="slot 0"):
        driver.runner.load_adapter(new, list(range(90)))
    driver.step((driver.sequence(PROMPT, adapter=new), 0))


def test_dropped_adapters_are_unknown(base: Path, tmp_path: Path) -> None:
    driver = Driver(base)
    state = driver.runner.register_adapter(str(save_adapter(base, tmp_path, 4, 1)))
    blocks = driver.runner.adapter_blocks(state.digest)
    driver.runner.drop_adapter(state.digest)
    assert blocks > 0
    with pytest.raises(AdapterError, match="register it first"):
        driver.runner.load_adapter(AdapterHandle(state.digest, 0, 1), list(range(blocks)))
    with pytest.raises(AdapterError, match="register it first"):
        driver.runner.adapter_blocks(state.digest)


def test_an_engine_without_lora_refuses_adapters(base: Path, tmp_path: Path) -> None:
    driver = Driver(base, enable_lora=False)
    with pytest.raises(AdapterError, match="LoRA disabled"):
        driver.runner.register_adapter(str(save_adapter(base, tmp_path, 4, 1)))


def test_changing_batches_never_mix_weights_up(base: Path, tmp_path: Path) -> None:
    """Twelve adapters, most of one rank, on all matrices or on some; each round another few are used,
    so that they are moved together; every answer is the one that the request gets alone."""
    targets = (r"model\.layers\.0\.mlp\.up_proj", r"model\.layers\.1\.self_attn\.v_proj", None)
    paths = [
        save_adapter(base, tmp_path / str(n), (4, 4, 4, 16)[n % 4], n, targets[n % 3])
        for n in range(12)
    ]
    alone: dict[int | None, list[int]] = {}
    for number in (None, *range(12)):
        single = Driver(base)
        handle = None if number is None else single.adapter(paths[number], 0)
        sequence = single.sequence(PROMPT, adapter=handle)
        single.run([sequence], count=6)
        alone[number] = sequence.output
    assert len({tuple(output) for output in alone.values()}) == 13

    driver = Driver(base, blocks=400)
    handles = [driver.adapter(path, slot) for slot, path in enumerate(paths)]
    choose = random.Random(11)
    stack_slots = {slot: held.stack_slot for slot, held in driver.runner.adapters._slots.items()}
    for round_number in range(10):
        chosen = choose.sample(range(12), choose.randint(1, 6))
        asked: list[int | None] = [
            number for number in chosen for _ in range(choose.choice((1, 1, 2, 12)))
        ]
        asked += [None] * choose.randint(0, 2)
        choose.shuffle(asked)
        sequences: list[Sequence] = [
            driver.sequence(PROMPT, adapter=None if n is None else handles[n]) for n in asked
        ]
        driver.run(sequences, chunk=choose.choice((0, 3)), count=6)
        for number, sequence in zip(asked, sequences, strict=True):
            assert sequence.output == alone[number], f"round {round_number}, adapter {number}"
            driver.finish(sequence)
    assert {slot: h.stack_slot for slot, h in driver.runner.adapters._slots.items()} != stack_slots


def test_a_stack_knows_which_matrices_its_adapters_change(base: Path) -> None:
    stack = LoraStack(Driver(base).runner.adapters._spec, slots=5, rank=2, dtype=torch.float32)
    every = [(layer, part) for layer, parts in enumerate(stack.b) for part in parts]
    choose = random.Random(3)
    held: dict[int, set[tuple[int, str]]] = {}
    for step in range(300):
        act = choose.choice(("store", "move", "swap", "clear"))
        one, other = choose.sample(range(5), 2)
        if act == "store":
            held[one] = set(choose.sample(every, 2))
            stack.store(one, {key: ones(stack, *key) for key in held[one]})
        elif act == "swap":
            held = {{one: other, other: one}.get(slot, slot): held[slot] for slot in held}
            stack.swap(one, other)
        elif act == "move" and one in held:
            held[other] = held[one]
            stack.move(one, other)
        elif act == "clear":
            held.pop(one, None)
            stack.clear(one)
        changed = {key for keys in held.values() for key in keys}
        assert stack.parts == changed, f"step {step}: {act}"
        assert stack.sites == {(layer, SITE_OF[part]) for layer, part in changed}
        for slot, keys in held.items():
            assert all(stack.b[layer][part][slot].any() for layer, part in keys)


def ones(stack: LoraStack, layer: int, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = stack.a[layer][SITE_OF[part]].shape[2]
    return torch.ones(2, inputs), torch.ones(2, stack.b[layer][part].shape[2])
