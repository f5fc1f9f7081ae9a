"""With `batch_invariant` every bit of a request's logits is that of the request alone."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.compiled import linear as dense
from engine.config import EngineConfig
from engine.decoding.sampling import Sampler
from engine.errors import AdapterError, ConfigError
from engine.loop import Engine
from engine.models.load import refuse_by_row
from engine.models.registry import model_spec
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.decoded_layers import DecodedLayers
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import VOCAB, reference, reference_logits, save_adapter
from tests.engine.checkpoints import save_checkpoint as save_any
from tests.engine.cpu.test_layers import save_checkpoint as save_whole
from tests.engine.helpers import ask
from tests.engine.models.test_family_parity import CASES
from tests.engine.speculation.test_draft_model import always

PROTECTS = ("engine/runners/cpu", "engine/speculation", "engine/decoding")

# Norms, biases, windows, caps, experts and rotations of every kind, with widths that no vector divides.
FAMILIES = ["llama-mha-biased", "qwen2-windows", "gemma2", "gemma3", "command-r", "granite", "olmo2",
            "phi3", "mixtral", "qwen2-moe", "qwen3-moe"]  # fmt: skip
Logits = dict[tuple[Any, ...], torch.Tensor]
Said = dict[tuple[str, int], list[Any]]


def save_checkpoint(folder: Path, case: str = "llama") -> Path:
    family, changes = CASES[case]
    return save_any(folder, family, **changes)


def engine_of(checkpoint: Path, **changes: Any) -> Engine:
    fields = {
        "model": str(checkpoint), "num_blocks": 40, "max_batch_tokens": 48, "max_running": 12,
        "threads": 2, "speculation": "off", "batch_invariant": True,
    }  # fmt: skip
    config = EngineConfig(**(fields | changes))
    return Engine(config, load_runner(config))


def drawn(draw: random.Random, digests: list[str | None], count: int = 14) -> list[GenerateRequest]:
    """Greedy and sampled requests, some of which begin with the same text, and some of which come
    before others that run."""
    shared = [draw.randrange(3, VOCAB) for _ in range(40)]
    found = []
    for number in range(count):
        own = [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 50))]
        prompt = shared[: draw.choice([0, 0, 17, 40])] + own
        kind: dict[str, Any] = draw.choice([
            {}, {"temperature": 1.5, "seed": number, "top_p": 0.95},
            {"temperature": 1.0, "seed": number, "typical_p": 0.9, "min_p": 0.01, "n": 2},
        ])  # fmt: skip
        found.append(
            ask(f"r{number}", prompt, draw.randrange(4, 14), adapter=draw.choice(digests),
                logprobs=5, priority=int(number % 5 == 4), **kind)
        )  # fmt: skip
    return found


def run(engine: Engine, requests: list[GenerateRequest], draw: random.Random) -> Said:
    """The tokens with their log-probabilities; requests arrive while others run."""
    said: Said = {}
    waiting = list(requests)
    while waiting or engine.busy:
        for _ in range(draw.randrange(0, 4)):
            if waiting:
                engine.submit(waiting.pop(0), "g")
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                key = chunk.request_id, chunk.choice
                said.setdefault(key, []).extend(zip(chunk.tokens, chunk.logprobs, strict=True))
    return said


class Watched:
    """The logits of every sampled row, by its request and position."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: Logits = {}
        plain = Sampler.__call__

        def _call(sampler: Sampler, rows: Any, logits: torch.Tensor, *rest: Any) -> Any:
            for row, each in zip(rows, logits, strict=True):
                adapter = row.adapter.digest if row.adapter else ""
                prompt, kind = tuple(row.history[: row.prompt_len]), row.sampling
                key = prompt, adapter, kind.temperature, kind.seed, row.choice, row.position
                found = self.logits.setdefault(key, each.clone())
                assert torch.equal(found, each), "computed again, with other bits"
            return plain(sampler, rows, logits, *rest)

        monkeypatch.setattr(Sampler, "__call__", _call)

    def take(self) -> Logits:
        found, self.logits = self.logits, {}
        return found


def check(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    adapters: list[Path] | None = None,
    **changes: Any,
) -> Engine:
    """Batches of requests against each request alone, in an engine that never cached anything.
    Returns the engine of the batches."""
    draw = random.Random(repr(changes))
    greedy = changes.pop("greedy", False)
    together = engine_of(checkpoint, **changes)
    changes = {k: v for k, v in changes.items() if k not in ("num_blocks", "max_batch_tokens")}
    alone = engine_of(checkpoint, num_blocks=400, max_batch_tokens=400, prefix_cache=False,
                      **(changes | {"threads": 1}))  # fmt: skip
    digests: list[str | None] = [None, None]
    for path in adapters or []:
        digests.append(together.load_adapter(str(path)).digest)
        alone.load_adapter(str(path))
    requests = drawn(draw, digests)
    if greedy:
        plain = SamplingParams(temperature=0.0, max_tokens=9, logprobs=5)
        requests = [replace(each, sampling=plain) for each in requests]
    watched = Watched(monkeypatch)
    said = run(together, requests, draw)
    logits = watched.take()
    expected: Said = {}
    for one in requests:
        for choice in range(one.sampling.n):
            name, sampling = f"{one.request_id}.{choice}", replace(one.sampling, n=choice + 1)
            found = run(alone, [replace(one, request_id=name, sampling=sampling)], draw)
            expected[one.request_id, choice] = found[name, choice]
    assert said == expected
    logits_alone = watched.take()
    assert len(logits) > 60
    assert all(torch.equal(logits_alone[key], each) for key, each in logits.items())
    assert together.metrics.counters["cached_tokens"] > 0
    return together


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.proof), "bfloat16"])
@pytest.mark.parametrize("case", FAMILIES)
def test_every_family(
    case: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(save_checkpoint(tmp_path, case), monkeypatch, dtype=dtype)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.proof), "bfloat16"])
def test_adapters_preemption_and_every_kind_of_instructions(
    level: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    targets = [None, ["q_proj", "down_proj"], ["gate_proj", "o_proj"]]
    adapters = [
        save_adapter(checkpoint, tmp_path / f"a{n}", rank, n, of)
        for n, (rank, of) in enumerate(zip((3, 8, 8), targets, strict=True))
    ]
    together = check(
        checkpoint, monkeypatch, adapters, dtype=dtype, num_blocks=18, max_batch_tokens=23
    )
    assert together.metrics.counters["preemptions"] > 0
    assert together.metrics.counters["recomputed_tokens"] > 0


@pytest.mark.parametrize(
    "changes", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_dtype": "int8"}], ids=str
)
def test_quantised_weights_and_caches(
    changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    adapters = [save_adapter(checkpoint, tmp_path / "a", 4, 1)]
    check(checkpoint, monkeypatch, adapters, dtype="bfloat16", **changes)


WHOLE = [
    "llama-mha-biased",
    "qwen3",
    "mistral",
    "mixtral",
]  # widths that one call of all layers takes


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        *((case, {}) for case in WHOLE),
        ("mixtral", {"quantization": "int8"}),
        ("llama-mha-biased", {"quantization": "int4"}),
        *(
            pytest.param(case, {"quantization": to}, marks=pytest.mark.proof)
            for case in WHOLE
            for to in ("int8", "int4")
            if (case, to) not in (("mixtral", "int8"), ("llama-mha-biased", "int4"))
        ),
    ],
    ids=str,
)
def test_models_whose_layers_are_one_call(
    case: str, changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode are computed in it, and prompts by operations, with the same bits."""
    calls, layers = [], DecodedLayers.__call__

    def _counted(given: DecodedLayers, *rest: Any) -> Any:
        found = layers(given, *rest)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(DecodedLayers, "__call__", _counted)
    checkpoint = save_whole(tmp_path / "base", case)
    kinds = zip((3, 8), [None, ["gate_proj", "o_proj"]], strict=True)
    adapters = [
        save_adapter(checkpoint, tmp_path / f"a{n}", rank, n, of)
        for n, (rank, of) in enumerate(kinds)
    ]
    check(checkpoint, monkeypatch, adapters if case != "mixtral" else None, dtype="float32",
          num_blocks=60, **changes)  # fmt: skip
    assert any(calls) and not all(calls)


@pytest.mark.parametrize("to", [pytest.param("int8", marks=pytest.mark.proof), "int4"])
def test_short_prompts_in_codes_have_the_same_bits_without_the_mode(
    level: str, to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of codes are the same for any number of rows, and so is attention up to 128 positions:
    greedy logits depend on no chunk, cached prefix, preemption or neighbour."""
    checkpoint = save_whole(tmp_path, "llama-mha-biased")
    check(checkpoint, monkeypatch, dtype="float32", num_blocks=18, max_batch_tokens=23,
          quantization=to, batch_invariant=False, greedy=True)  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculation_changes_no_bit(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path)
    always(monkeypatch)
    plain = engine_of(checkpoint, dtype=dtype)
    guessing = engine_of(
        checkpoint, dtype=dtype, speculation="auto", draft_model=str(checkpoint), num_blocks=200
    )
    requests = drawn(random.Random(2), [None])
    found = [run(engine, requests, random.Random(3)) for engine in (plain, guessing)]
    assert found[0] == found[1]
    assert guessing.metrics.counters["drafted_tokens"] > 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(50, 70), (5, 33), (96, 128)], ids=str)
def test_products_are_those_of_numbers_in_float64(
    level: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(1)
    matrices = [torch.randn(shape, generator=draw).to(dtype) for _ in range(4)]
    biases = [torch.randn(shape[0], generator=draw) for _ in range(4)]
    packed = [dense.PackedFloats(*pair) for pair in zip(matrices, biases, strict=True)]
    x = torch.randn(53, shape[1] + 9, generator=draw).to(dtype)[:, 4:-5]
    other = torch.randn(53, shape[0], generator=draw).to(dtype)
    exact = [
        x.double() @ matrix.double().t() + bias
        for matrix, bias in zip(matrices, biases, strict=True)
    ]
    near = {"rtol": 1e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 2e-5}
    sums = dense.grouped_product(x, [(packed[0], None, 0, 53)], other=other)
    torch.testing.assert_close(sums.double(), exact[0] + other.double(), **near)
    groups = [
        (packed[0], packed[1], 0, 0),
        (packed[0], packed[1], 0, 19),
        (packed[2], packed[3], 19, 34),
    ]
    for activation, act in (
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda y: torch.nn.functional.gelu(y, approximate="tanh")),
    ):
        gated = dense.grouped_product(x, groups, activation)
        expected = torch.cat(((act(exact[1]) * exact[0])[:19], (act(exact[3]) * exact[2])[19:]))
        scale = near | {"atol": near["atol"] * 20}
        torch.testing.assert_close(gated.double(), expected, **scale)


def test_logits_are_those_of_transformers(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the attention of each kind of instructions, with windows and soft caps."""
    for case in ("gemma2", "qwen2-windows"):
        checkpoint = save_checkpoint(tmp_path / case, case)
        ids = torch.randint(3, VOCAB, (90,), generator=torch.Generator().manual_seed(1)).tolist()
        watched = Watched(monkeypatch)
        run(
            engine_of(checkpoint, dtype="float32"), [ask("r", ids, 1, logprobs=1)], random.Random(1)
        )
        (logits,) = watched.take().values()
        exact = reference_logits(reference(checkpoint), ids)[-1]
        torch.testing.assert_close(logits, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"dtype": "float16"}, "needs dtype float32 or bfloat16"),
        ("deepseek-v2", {}, "not served with multi-head latent attention"),
        ("gpt-oss", {}, "not served with clamped experts"),
        ("bloom", {}, "not served with ALiBi"),
    ],
)
def test_what_is_not_computed_row_by_row_is_refused(
    case: str, changes: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"batch_invariant.*{message}"):
        engine_of(save_checkpoint(tmp_path, case), **changes)


def test_without_a_compiler_and_on_a_gpu_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(dense, "kernel", None)
        with pytest.raises(ConfigError, match="install a C compiler"):
            engine_of(checkpoint)
    spec = model_spec(json.loads((checkpoint / "config.json").read_text()))
    with pytest.raises(ConfigError, match="on a CPU only"):
        refuse_by_row(spec, torch.float32, torch.device("cuda:0"))


def test_adapters_of_other_kinds_are_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base")
    adapter = save_adapter(checkpoint, tmp_path / "a", 4, 1, use_dora=True)
    with pytest.raises(AdapterError, match="with batch_invariant, DoRA"):
        engine_of(checkpoint).load_adapter(str(adapter))


def test_the_mode_is_announced_and_has_cache_keys_of_its_own(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path)
    engines = [engine_of(checkpoint, batch_invariant=on) for on in (True, False)]
    for engine, value in zip(engines, (1, 0), strict=True):
        assert re.search(rf"engine_batch_invariant{{.*}} {value}\n", engine.metrics_text())
    infos = [engine.info for engine in engines]
    assert [info.batch_invariant for info in infos] == [True, False]
    assert infos[0].dtype != infos[1].dtype
