"""An engine over a group of ranks answers as an engine alone: what is asked of it in every form."""

import queue
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.backends.compiled.group import Group, group_bytes
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.errors import AdapterError, ConfigError
from engine.loop import Engine
from engine.parallel.follower import Answer, Follower
from engine.parallel.limits import check_limits
from engine.parallel.ring import RingReader, RingWriter, ring_bytes
from engine.parallel.runner import ParallelRunner
from engine.protocol import GenerateRequest, Grammar, Receipt, SamplingParams, TokenChunk
from engine.runners.cpu.runner import load_rank, load_runner
from tests.engine.checkpoints import VOCAB, save_adapter, save_checkpoint

SIZE = 2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


def config_of(checkpoint: Path, **changes: object) -> EngineConfig:
    fields = {"model": str(checkpoint), "num_blocks": 96, "threads": 1, "dtype": "float32"}
    return EngineConfig(**(fields | changes))  # type: ignore[arg-type]


@contextmanager
def group_engine(checkpoint: Path, **changes: object) -> Iterator[Engine]:
    """The other ranks are threads of this process."""
    config = config_of(checkpoint, tp=SIZE, compare_ranks=True, **changes)
    memory, ring = np.zeros(group_bytes(SIZE), np.uint8), np.zeros(ring_bytes(), np.uint8)
    groups = [Group(memory, rank, SIZE, 60) for rank in range(SIZE)]
    answers: list[queue.SimpleQueue[Answer]] = [queue.SimpleQueue() for _ in range(1, SIZE)]

    def follow(rank: int) -> None:
        group = groups[rank]
        runner = load_rank(config, group)
        reader = RingReader(ring, SIZE, group.over_address, rank)
        Follower(runner, group, reader, answers[rank - 1].put).run()

    threads = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, SIZE)]
    for thread in threads:
        thread.start()
    local = load_rank(config, groups[0])
    runner = ParallelRunner(
        local, groups[0], RingWriter(ring, SIZE, groups[0].over_address, 60), answers
    )
    try:
        yield Engine(config, runner)
    finally:
        runner.close()
        for thread in threads:
            thread.join()


def prompt(length: int, seed: int) -> list[int]:
    random = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(3, VOCAB, (length,), generator=random).tolist()
    return found


def request(
    number: int, length: int, adapter: str | None = None, **asked: object
) -> GenerateRequest:
    fields: dict[str, object] = {"max_tokens": 12, "temperature": 0.0} | asked
    return GenerateRequest(
        request_id=f"r{number}",
        namespace="t",
        prompt=prompt(length, length),
        sampling=SamplingParams(**fields),  # type: ignore[arg-type]
        adapter=adapter,
    )


def answers_of(engine: Engine, requests: list[GenerateRequest]) -> dict[str, object]:
    """Tokens and counts of each request."""
    for each in requests:
        engine.submit(each, "me")
    found: dict[str, object] = {}
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                tokens.setdefault((chunk.request_id, chunk.choice), []).extend(chunk.tokens)
            for receipt in outbox.receipts:
                counts = receipt.prompt, receipt.cached, receipt.generated, receipt.delivered
                found[receipt.request_id] = counts, receipt.finish_reason, receipt.message
    engine.check_integrity()
    return found | {f"{name} {choice}": each for (name, choice), each in tokens.items()}


ASKED: list[list[GenerateRequest]] = [
    [request(1, 40), request(2, 5), request(3, 70, n=2, temperature=0.8, seed=7)],
    [request(4, 70), request(5, 33, use_beam_search=True, n=2)],  # of which 4 finds its prompt
]


@pytest.mark.parametrize(
    "settings",
    [{}, {"kv_dtype": "int8"}, {"kv_window": 24}, {"max_batch_tokens": 16, "max_running": 4},
     {"overlap": True}, {"batch_invariant": True}],
    ids=str,
)  # fmt: skip
def test_answers_are_those_of_one_process(llama: Path, settings: dict[str, object]) -> None:
    alone = Engine(config_of(llama, **settings), load_runner(config_of(llama, **settings)))
    expected = [answers_of(alone, requests) for requests in ASKED]
    with group_engine(llama, **settings) as engine:
        assert [answers_of(engine, requests) for requests in ASKED] == expected


def test_adapters_are_read_loaded_and_dropped_on_all_ranks(llama: Path, tmp_path: Path) -> None:
    paths = [save_adapter(llama, tmp_path / f"r{rank}", rank, rank) for rank in (2, 5)]
    config = config_of(llama, max_adapter_slots=1)
    alone = Engine(config, load_runner(config))
    with group_engine(llama, max_adapter_slots=1) as engine:
        for turn in range(2):  # one slot: each loads in place of the other
            digests = [alone.load_adapter(str(path)).digest for path in paths]
            assert [engine.load_adapter(str(path)).digest for path in paths] == digests
            requests = [
                request(10 * turn + number, 20, digest)
                for number, digest in enumerate([*digests, None, *digests])
            ]
            assert answers_of(engine, requests) == answers_of(alone, requests)
            for digest in digests:
                engine.unload_adapter(digest)
                alone.unload_adapter(digest)
        with pytest.raises(AdapterError):
            engine.load_adapter(str(tmp_path / "absent"))
        assert answers_of(engine, [request(99, 9)]) == answers_of(alone, [request(99, 9)])


TOKENIZER = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
REPEATED = TOKENIZER.encode("one two three four five six " * 8).ids


def demo_request(name: str, ids: list[int], **asked: object) -> GenerateRequest:
    fields: dict[str, object] = {"max_tokens": 24, "temperature": 0.0} | asked
    sampling = SamplingParams(**fields)  # type: ignore[arg-type]
    return GenerateRequest(name, "t", ids, sampling)


SPECIAL = [
    demo_request(
        "grammar", REPEATED[:9], grammar=Grammar("regex", "[A-Z]{2}-[0-9]{3}"), ignore_eos=False
    ),
    demo_request("scored", REPEATED[:20], logprobs=3, prompt_logprobs=2, ignore_eos=True),
    demo_request("vector", REPEATED[:12], max_tokens=0, pooling="mean"),
]


def delivered(
    engine: Engine, requests: list[GenerateRequest]
) -> tuple[dict[str, list[TokenChunk]], dict[str, Receipt]]:
    for each in requests:
        engine.submit(each, "me")
    chunks: dict[str, list[TokenChunk]] = {}
    receipts: dict[str, Receipt] = {}
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                chunks.setdefault(chunk.request_id, []).append(chunk)
            receipts |= {each.request_id: each for each in outbox.receipts}
    return chunks, receipts


def test_grammars_scores_vectors_and_guesses_are_those_of_one_process() -> None:
    config = config_of(MODEL_DIR)
    guessed = demo_request("guessed", REPEATED, max_tokens=40, ignore_eos=True)
    expected, _ = delivered(Engine(config, load_runner(config)), [*SPECIAL, guessed])
    guessed.prediction = [t for each in expected["guessed"] for t in each.tokens]
    with group_engine(MODEL_DIR) as engine:
        found, receipts = delivered(engine, [*SPECIAL, guessed])

    for name in ("grammar", "scored", "guessed"):
        tokens = [[t for each in of[name] for t in each.tokens] for of in (found, expected)]
        assert tokens[0] == tokens[1], name
    text = TOKENIZER.decode([t for each in found["grammar"] for t in each.tokens])
    assert re.fullmatch("[A-Z]{2}-[0-9]{3}", text)
    assert receipts["guessed"].accepted > 0
    scores = [
        [top for each in of["scored"] for t in each.logprobs or () for _, top in t.top]
        + [t.logprob or 0.0 for each in of["scored"] for t in each.prompt_logprobs or ()]
        for of in (found, expected)
    ]
    assert len(scores[0]) == 24 * 3 + 20
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)
    vectors = [np.frombuffer(of["vector"][0].embedding or b"", "<f4") for of in (found, expected)]
    assert len(vectors[0])
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("draft_model", "x"), ("draft_heads", "x"), ("tier_ram_bytes", 1 << 20), ("tier_disk", "x"),
     ("device", "cuda:0")],
)  # fmt: skip
def test_what_ranks_do_not_serve_is_refused_by_name(
    llama: Path, setting: str, value: object
) -> None:
    with pytest.raises(ConfigError, match=f"{setting} .*tp is 2"):
        check_limits(config_of(llama, tp=2, **{setting: value}))


def test_heads_that_cannot_be_divided_are_refused_with_the_numbers_that_can(llama: Path) -> None:
    memory = np.zeros(group_bytes(3), np.uint8)
    with pytest.raises(
        ConfigError, match=r"tp is 3: 4 query heads on 2 key heads .* use 1, 2 or 4"
    ):
        load_rank(config_of(llama, tp=3), Group(memory, 0, 3, 1))
