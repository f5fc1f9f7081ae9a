"""best_of and beam search: by `transformers`, by a plain search over its logits, and by hand."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import RequestError
from engine.loop import Engine
from engine.outputs.beams import BeamSearch
from engine.outputs.best_of import best_choices
from engine.protocol import (
    FinishReason,
    GenerateRequest,
    Receipt,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)
from tests.engine.checkpoints import adapted_reference, reference, save_adapter, save_checkpoint
from tests.engine.cpu_engine import engine_of
from tests.engine.helpers import Clock, make_config, make_engine

PROMPT = [5, 9, 12, 40, 33, 71, 8, 17, 99, 23, 14, 3, 77, 18, 42, 6, 51, 60, 11]
EOS = 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("base"))


@dataclass
class Answer:
    chunks: list[TokenChunk] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)

    def tokens(self, choice: int) -> list[int]:
        return [t for chunk in self.chunks if chunk.choice == choice for t in chunk.tokens]


def finish(engine: Engine) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while engine.busy:
        engine.step()
        for origin, outbox in engine.take_outboxes().items():
            assert origin == "g", "nothing of the requests inside leaves the engine"
            for chunk in outbox.chunks:
                found.setdefault(chunk.request_id, Answer()).chunks.append(chunk)
            for receipt in outbox.receipts:
                found.setdefault(receipt.request_id, Answer()).receipts.append(receipt)
    return found


def ask(engine: Engine, name: str = "r", **sampling: Any) -> None:
    fields = {key: sampling.pop(key) for key in ("adapter", "deadline_s") if key in sampling}
    params = SamplingParams(**({"max_tokens": 6} | sampling))
    engine.submit(GenerateRequest(name, "acme", PROMPT, params, **fields), "g")


def searched(model: Any, width: int, count: int, power: float, eos: int | None) -> list[Any]:
    """Every step by one pass over the whole sequence. [(tokens, log-probability)], best first."""
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(count):
        grown = []
        for tokens, total in live:
            with torch.no_grad():
                logits = model(torch.tensor([PROMPT + tokens])).logits[0, -1].double()
            best = torch.log_softmax(logits, -1).topk(2 * width)
            for value, token in zip(*(each.tolist() for each in best), strict=True):
                (ended if token == eos else grown).append(([*tokens, token], total + value))
        live = sorted(grown, key=lambda each: -each[1])[:width]

    def score(each: tuple[list[int], float]) -> float:
        length = len(PROMPT) + len(each[0]) - (each[0][-1] == eos)
        return each[1] / length**power

    return sorted(ended + live, key=score, reverse=True)[:width]


@pytest.mark.parametrize("power", [0.0, 1.0, 6.0, -1.0])
def test_beams_are_those_of_a_plain_search(base: Path, power: float) -> None:
    engine, model = engine_of(base, dtype="float32"), reference(base)
    stop = searched(model, 4, 6, power, None)[1][0][2]  # that some beams reach and others do not
    expected = searched(model, 4, 6, power, stop)
    assert power > 1 or sum(tokens[-1] == stop for tokens, _ in expected) > 0
    ask(
        engine, n=4, use_beam_search=True, length_penalty=power, logprobs=2, ignore_eos=True,
        stop_token_ids=(stop,),
    )  # fmt: skip
    answer = finish(engine)["r"]
    assert [answer.tokens(choice) for choice in range(4)] == [tokens for tokens, _ in expected]
    for chunk, (tokens, total) in zip(answer.chunks, expected, strict=True):
        assert chunk.logprobs is not None
        assert sum(each.logprob for each in chunk.logprobs) == pytest.approx(total, abs=1e-3)
        assert {len(each.top) for each in chunk.logprobs} == {2}
        ended = FinishReason.STOP if tokens[-1] == stop else FinishReason.LENGTH
        assert chunk.finish_reason is ended


def test_beams_are_those_of_transformers(base: Path) -> None:
    """Without ends and penalty both rank by the log-probability of all tokens."""
    engine, model = engine_of(base, dtype="float32"), reference(base)
    ask(engine, n=3, use_beam_search=True, length_penalty=0.0, ignore_eos=True, max_tokens=8)
    answer = finish(engine)["r"]
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), num_beams=3,
        num_return_sequences=3, max_new_tokens=8, do_sample=False, length_penalty=0.0,
        pad_token_id=0,
    )  # fmt: skip
    assert [answer.tokens(n) for n in range(3)] == found[:, len(PROMPT) :].tolist()


def test_beams_with_an_adapter_beside_another_request(base: Path, tmp_path: Path) -> None:
    path = save_adapter(base, tmp_path, rank=4, seed=1)
    engine = engine_of(base, dtype="float32")
    digest = engine.load_adapter(str(path)).digest
    ask(engine, "beams", n=3, use_beam_search=True, adapter=digest)
    ask(engine, "other", temperature=0.0, ignore_eos=True, max_tokens=9)
    found = finish(engine)
    expected = searched(adapted_reference(base, path), 3, 6, 1.0, EOS)
    assert [found["beams"].tokens(n) for n in range(3)] == [tokens for tokens, _ in expected]
    assert found["beams"].receipts[0].adapter == digest
    assert len(found["other"].tokens(0)) == 9
    engine.unload_adapter(digest)
    assert digest not in engine.adapters.known


def test_the_receipt_of_beams_counts_the_prompt_once(base: Path) -> None:
    """16 of 19 prompt tokens are in whole blocks; each later step computes the rest of its beam."""
    engine = engine_of(base, dtype="float32")
    ask(engine, n=2, use_beam_search=True, max_tokens=3, ignore_eos=True)
    (receipt,) = finish(engine)["r"].receipts
    assert (receipt.prompt, receipt.cached, receipt.computed) == (19, 0, 19)
    assert (receipt.generated, receipt.delivered) == (6, 6)
    assert receipt.recomputed == 2 * (4 + 5)
    assert receipt.finish_reason is FinishReason.LENGTH
    assert not engine.requests and not len(engine.searches.keys())
    assert engine.receipts.of("g") == [receipt] and len(engine.receipts) == 1


def test_best_of_delivers_the_likeliest_samples(base: Path) -> None:
    """The candidates are those that `n` alone returns with the same seed."""
    settings: dict[str, Any] = {"seed": 7, "temperature": 1.5, "max_tokens": 7}
    engine = engine_of(base, dtype="float32")
    ask(engine, "all", n=6, logprobs=1, **settings)
    every = finish(engine)["all"]
    means, tokens = {}, {}
    for choice in range(6):
        listed = [p for c in every.chunks if c.choice == choice for p in c.logprobs or ()]
        means[choice] = sum(each.logprob for each in listed) / len(listed)
        tokens[choice] = every.tokens(choice)
    ranked = sorted(means, key=lambda choice: -means[choice])
    ask(engine, "best", n=2, best_of=6, **settings)
    best = finish(engine)["best"]
    assert [best.tokens(0), best.tokens(1)] == [tokens[ranked[0]], tokens[ranked[1]]]
    assert [chunk.logprobs for chunk in best.chunks] == [None, None]
    (receipt,) = best.receipts
    assert receipt.generated == sum(map(len, tokens.values()))
    assert receipt.delivered == len(best.tokens(0)) + len(best.tokens(1))
    assert receipt.prompt == len(PROMPT)


def test_candidates_rank_by_their_mean() -> None:
    def chunk(choice: int, *values: float, ended: bool = True) -> TokenChunk:
        listed = [TokenLogprob(9, value) for value in values]
        reason = FinishReason.STOP if ended else None
        return TokenChunk("r", choice, [choice] * len(values), listed, reason)

    held = [chunk(0, -1, -5), chunk(1, -2, ended=False), chunk(2, -2.5), chunk(1, -2, -2)]
    params = SamplingParams(4, n=2, best_of=3)
    best = best_choices(held, params, FinishReason.STOP)
    assert [(each.choice, each.tokens) for each in best] == [(0, [1, 1, 1]), (1, [2])]
    aborted = best_choices(held, params, FinishReason.ABORT)
    assert [each.tokens for each in aborted] == [[], []]


def test_a_search_by_hand() -> None:
    """Two beams; the end after 8 is better than all that follows, so the search stops early."""
    search = BeamSearch(1, SamplingParams(4, n=1, length_penalty=1.0), frozenset({EOS}), 4)
    search.advance([TokenLogprob(0, 0.0, ((7, -1.0), (8, -1.5)))])
    assert [beam.tokens for beam in search.live] == [(7,)] and not search.done
    search.advance([TokenLogprob(0, 0.0, ((EOS, -0.2), (9, -4.0)))])
    # Ended: -1.2 / (1 + 2 - 1). The other has -5 / 5 at best, which is less.
    assert search.done
    ((beam, reason),) = search.best()
    assert (beam.tokens, reason) == ((7, EOS), FinishReason.STOP)
    assert search.generated == 3


def test_no_end_before_the_least_length() -> None:
    params = SamplingParams(4, n=1, min_tokens=2)
    search = BeamSearch(1, params, frozenset({EOS}), 4)
    search.advance([TokenLogprob(0, 0.0, ((EOS, -0.1), (8, -1.5)))])
    assert [beam.tokens for beam in search.live] == [(8,)]


@pytest.mark.parametrize("after", [0, 3])
def test_an_aborted_search_leaves_one_receipt_and_nothing_behind(after: int) -> None:
    engine = make_engine(make_config(num_blocks=64))
    ask(engine, n=3, use_beam_search=True, max_tokens=50, ignore_eos=True)
    for _ in range(after):
        engine.step()
        engine.take_outboxes()
    assert engine.under_way("g") == ["r"]
    assert engine.abort("r", "another gateway") is False
    assert engine.abort("r", "g")
    answer = finish(engine)["r"]
    assert [chunk.finish_reason for chunk in answer.chunks] == [FinishReason.ABORT] * 3
    (receipt,) = answer.receipts
    assert (receipt.finish_reason, receipt.delivered) == (FinishReason.ABORT, 0)
    assert receipt.prompt == receipt.cached + receipt.computed
    assert engine.under_way("g") == [] and not engine.scheduler.running
    with pytest.raises(RequestError, match="was sent before"):
        ask(engine, n=3, use_beam_search=True)


@pytest.mark.parametrize("overlap", [False, True])
def test_searches_and_samples_of_many_tenants_end_with_nothing_held(overlap: bool) -> None:
    """More beams than may run at once, on either loop, without a prefix cache too."""
    engine = make_engine(make_config(max_running=4, overlap=overlap, prefix_cache=not overlap))
    for number in range(5):
        ask(engine, f"beams{number}", n=3, use_beam_search=True, max_tokens=5, ignore_eos=True)
        ask(engine, f"best{number}", n=1, best_of=4, max_tokens=5, ignore_eos=True)
    found = finish(engine)
    assert len(found) == 10
    for name, answer in found.items():
        (receipt,) = answer.receipts
        assert [len(chunk.tokens) for chunk in answer.chunks] == [5] * (3 if "beams" in name else 1)
        assert receipt.delivered == 15 if "beams" in name else (
            receipt.delivered, receipt.generated,
        ) == (5, 20)  # fmt: skip
        assert (receipt.prompt, receipt.unprocessed) == (len(PROMPT), 0)
        assert receipt.cached + receipt.computed == receipt.prompt
    assert engine.pool.available("acme", True) == engine.pool.num_blocks
    assert {receipt.request_id for receipt in engine.receipts.of("g")} == set(found)
    assert len(engine.receipts) == 10


def test_an_engine_that_stops_writes_the_receipt_of_a_search() -> None:
    engine = make_engine()
    ask(engine, n=3, use_beam_search=True, max_tokens=50, ignore_eos=True)
    for _ in range(3):
        engine.step()
        engine.take_outboxes()
    engine.abandon("the engine stops")
    (outbox,) = engine.take_outboxes().values()
    (receipt,) = outbox.receipts
    assert receipt.request_id == "r" and receipt.message == "the engine stops"
    assert receipt.finish_reason is FinishReason.ERROR
    assert (receipt.prompt, receipt.generated, receipt.delivered) == (
        0,
        9,
        0,
    )  # 3 tokens of 3 beams


def test_a_step_that_fails_ends_its_search() -> None:
    engine = make_engine()
    ask(engine, n=2, use_beam_search=True, max_tokens=50, ignore_eos=True)
    engine.step()
    engine.take_outboxes()
    launch, engine._runner.launch = engine._runner.launch, lambda _: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    engine.step()
    engine._runner.launch = launch  # type: ignore[method-assign]
    answer = finish(engine)["r"]
    assert {chunk.finish_reason for chunk in answer.chunks} == {FinishReason.ERROR}
    assert "ZeroDivisionError" in answer.receipts[0].message
    assert (answer.receipts[0].prompt, answer.receipts[0].unprocessed) == (0, len(PROMPT))


def test_a_deadline_ends_a_search() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    ask(engine, n=2, use_beam_search=True, max_tokens=50, ignore_eos=True, deadline_s=5.0)
    for _ in range(3):
        engine.step()
        engine.take_outboxes()
    clock.now += 6
    answer = finish(engine)["r"]
    assert answer.receipts[0].finish_reason is FinishReason.DEADLINE
    assert answer.receipts[0].delivered == 0


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ({"n": 3, "best_of": 2}, "best_of is 2: it must be from n to 8"),
        ({"best_of": 21}, "best_of is 21"),
        (
            {"n": 3, "use_beam_search": True, "length_penalty": float("nan")},
            "length_penalty is nan",
        ),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p cannot be combined with use_beam_search"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty cannot be combined"),
        ({"use_beam_search": True, "best_of": 2}, "best_of cannot be combined"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(sampling: dict[str, Any], told: str) -> None:
    engine = make_engine()
    with pytest.raises(RequestError, match=told):
        ask(engine, **sampling)
    assert not engine.busy
