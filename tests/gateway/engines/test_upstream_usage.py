"""What an OpenAI-compatible server's answer costs, whichever way it cuts, delays or misreports it."""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from core.errors import TollhouseError
from core.events import CountedBy
from engine.demo.paths import MODEL_DIR
from engine.protocol import FinishReason, GenerateRequest, Receipt, SamplingParams
from gateway.answers.choices import ChoiceOutput
from gateway.answers.chunks import group_chunks
from gateway.catalog.codec.tokenizing import load_codec
from gateway.engines.openai_response import ResponseParser
from gateway.engines.upstream_usage import UpstreamReceipt, UsageCounter
from gateway.metering.meter import Ending, counts_of
from gateway.request.engine import Chunk, Job, Mailbox, TextChunk
from gateway.request.inference import InferenceRequest
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.gateway.fake_upstream import Server, upstream

CODEC = load_codec(MODEL_DIR)
TEXTS = st.text(st.sampled_from("abc déü€\n漢字😀.,"), min_size=1, max_size=200)


def count(text: str) -> int:
    return len(CODEC.encode(text))


def a_job(*, stream: bool, n: int = 1, max_tokens: int = 500) -> Job:
    request = InferenceRequest(
        "/v1/chat/completions",
        "m",
        messages=[{"role": "user", "content": "Hi"}],
        stream=stream,
        n=n,
    )
    return Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(max_tokens)), request)


def event(text: str, reason: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": {"content": text, **delta}, "finish_reason": reason}
    return {"choices": [choice], **({"usage": usage} if usage is not None else {})}


def usage(tokens: int, reasoning: int = 0) -> dict[str, Any]:
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {}
    return {"prompt_tokens": 7, "completion_tokens": tokens, **details}


async def _bill(
    body: list[bytes], kind: str, *, tokenizer: bool, leaves_after: int | None, job: Job
) -> tuple[int, int, UpstreamReceipt]:
    """(billed, waived, receipt) of a response that comes in the pieces of `body`."""
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", job, mailbox, lambda _: None, count if tokenizer else None)
    parser.on_headers(200, kind)
    choice = ChoiceOutput(0, None)
    for number, piece in enumerate(body):
        if number == leaves_after:
            break
        parser.on_data(piece)
        for run in group_chunks(_ready(mailbox)):
            choice.feed_run(run)
        choice.take()
        choice.sent()
    left = leaves_after is not None and leaves_after < len(body)
    parser.abort() if left else parser.on_end()
    for run in group_chunks(_ready(mailbox)):
        choice.feed_run(run)
    if not left:
        choice.take()
        choice.sent()
    receipt = await mailbox.ended(1)
    assert isinstance(receipt, UpstreamReceipt)
    ending = Ending(choice.delivered, choice.received, "stop", 499 if left else 200, True)
    counts = counts_of(7, ending, receipt)
    return counts.output, counts.waived, receipt


def _ready(mailbox: Mailbox) -> list[Chunk]:
    ready, mailbox._chunks = mailbox._chunks, []
    return ready


def streamed(
    events: list[dict[str, Any]], *, tokenizer: bool = False, leaves_after: int | None = None
) -> tuple[int, int, UpstreamReceipt]:
    pieces = [f"data: {json.dumps(each)}\n\n".encode() for each in events]
    pieces += [b"data: [DONE]\n\n"]
    return asyncio.run(
        _bill(
            pieces,
            "text/event-stream",
            tokenizer=tokenizer,
            leaves_after=leaves_after,
            job=a_job(stream=True),
        )
    )


def whole(text: str, used: Any, *, tokenizer: bool = False) -> tuple[int, int, UpstreamReceipt]:
    message = {"role": "assistant", "content": text}
    answer: dict[str, Any] = {
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]
    }
    if used is not None:
        answer["usage"] = used
    return asyncio.run(
        _bill(
            [json.dumps(answer).encode()],
            "application/json",
            tokenizer=tokenizer,
            leaves_after=None,
            job=a_job(stream=False),
        )
    )


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def stream_of(text: str, cuts: list[int], reports: str, tokens: int) -> list[dict[str, Any]]:
    """`reports`: none, late (an event of its own), with the last choice, or on every event."""
    parts = pieces_of(text, cuts)
    events = [event(part) for part in parts]
    if reports == "every":
        sent = 0
        for number, part in enumerate(parts):
            sent += len(part)
            events[number]["usage"] = usage(max(1, tokens * sent // len(text)))
    events.append(event("", "stop", usage(tokens) if reports in ("last", "every") else None))
    if reports == "late":
        events.append({"choices": [], "usage": usage(tokens)})
    return events


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 300), max_size=30),
    reports=st.sampled_from(["none", "late", "last", "every"]),
    tokens=st.integers(1, 500),
    tokenizer=st.booleans(),
)
def test_a_stream_costs_what_the_whole_answer_costs_however_it_is_cut(
    text: str, cuts: list[int], reports: str, tokens: int, tokenizer: bool
) -> None:
    reported = None if reports == "none" else usage(tokens)
    billed, waived, receipt = streamed(stream_of(text, cuts, reports, tokens), tokenizer=tokenizer)
    at_once, waived_at_once, of_whole = whole(text, reported, tokenizer=tokenizer)
    if reports != "none":
        expected, by = tokens, CountedBy.UPSTREAM
    elif tokenizer:
        expected, by = count(text), CountedBy.TOKENIZER
    else:
        expected, by = -(-len(text.encode()) // 4), CountedBy.ESTIMATE
    assert (billed, waived, receipt.counted_by) == (expected, 0, by)
    assert (at_once, waived_at_once, of_whole.counted_by) == (expected, 0, by)


@settings(max_examples=100, deadline=None)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 300), min_size=1, max_size=30),
    reports=st.sampled_from(["none", "late", "every"]),
    leaves_after=st.integers(0, 32),
)
def test_who_leaves_early_pays_no_more_than_the_whole_and_nothing_generated_is_lost(
    text: str, cuts: list[int], reports: str, leaves_after: int
) -> None:
    tokens = count(text)
    events = stream_of(text, cuts, reports, tokens)
    billed, waived, receipt = streamed(events, tokenizer=True, leaves_after=leaves_after)
    assert billed + waived == receipt.generated
    arrived = sum(
        len(choice["delta"]["content"])
        for each in events[:leaves_after]
        for choice in each["choices"]
    )
    assert receipt.characters == arrived
    assert billed <= receipt.generated
    if reports == "every" and leaves_after:
        assert receipt.counted_by is CountedBy.UPSTREAM and billed <= tokens
    if not arrived:
        assert billed == 0


def test_a_reasoning_model_is_billed_for_its_reasoning() -> None:
    events = [event("", reasoning_content="Let me think. " * 30), event("Five.", "stop")]
    events.append({"choices": [], "usage": usage(406, 400)})
    billed, waived, receipt = streamed(events)
    assert (billed, waived, receipt.counted_by) == (406, 0, CountedBy.UPSTREAM)
    left, kept, _ = streamed(events, leaves_after=1)
    assert (left, kept) == (-(-len("Let me think. " * 30) // 4), 0), "its text arrived"


def test_an_answer_of_reasoning_alone_is_billed() -> None:
    events = [event("", reasoning_content="Hm. "), event("", "length", usage(50, 50))]
    assert streamed(events)[:2] == (50, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_tokens": 7, "completion_tokens": 0},
        {"prompt_tokens": 7, "completion_tokens": -3},
        {"prompt_tokens": 7, "completion_tokens": 10**12},
        {"prompt_tokens": 7, "completion_tokens": 5000},
        {"prompt_tokens": 7, "completion_tokens": "9"},
        {"prompt_tokens": 7, "completion_tokens": True},
        {"prompt_tokens": None},
        [9],
    ],
)
def test_a_report_that_cannot_be_true_is_not_the_bill(wrong: Any) -> None:
    text = "The gate opens at nine."
    for billed, waived, receipt in (
        whole(text, wrong, tokenizer=True),
        streamed([event(text, "stop"), {"choices": [], "usage": wrong}], tokenizer=True),
    ):
        assert (billed, waived) == (count(text), 0)
        assert receipt.counted_by is CountedBy.TOKENIZER
        assert receipt.prompt == 7


def test_a_report_that_came_before_the_last_text_is_extended() -> None:
    events = [event("aaaa", None, usage(2)), event("bbbb"), event("", "stop")]
    billed, waived, receipt = streamed(events, tokenizer=True)
    assert (billed, waived, receipt.counted_by) == (4, 0, CountedBy.UPSTREAM)


def test_long_text_is_counted_the_same_in_any_pieces() -> None:
    text = "The quick brown fox jumps over 13 lazy dogs. " * 400
    counts = {
        streamed(stream_of(text, list(range(0, len(text), step)), "none", 0), tokenizer=True)[0]
        for step in (1000, 4097, len(text))
    }
    assert len(counts) == 1
    assert abs(counts.pop() - count(text)) <= len(text) // 2048


def test_our_own_engines_are_counted_by_token() -> None:
    receipt = Receipt("r", "t", None, 7, 0, 7, 0, 9, 9, 0, 0, "stop", 0.0, 0.0, 0.0)  # type: ignore[arg-type]
    assert counts_of(7, Ending(4, 9, "stop", 200, True), receipt).output == 4


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with upstream() as made:
        yield made


@pytest.fixture(scope="module", params=["tokenizer", "none"])
def reseller(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    entry = {"url": server.url, "name": "u", "model": MODEL}
    if request.param == "tokenizer":
        entry["tokenizer"] = str(MODEL_DIR)
    path: Path = tmp_path_factory.mktemp("reseller")
    with running_deployment(
        path, engines=None, settings={"upstreams": json.dumps([entry])}
    ) as deployment:
        yield deployment


def test_the_usage_event_says_what_counted(reseller: Deployment, server: Server) -> None:
    merged = [event("one two three four", None), event(" five six", "stop")]
    path = "/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    told, billed = [], []
    for stream in (merged, [*merged, {"choices": [], "usage": usage(30)}]):
        server.answers[path] = stream
        answer = httpx.post(
            f"{reseller.url}{path}", json=body, headers=reseller.headers, timeout=60
        )
        last = json.loads(answer.text.strip().split("\n\n")[-2].removeprefix("data: "))
        told.append(last["usage"]["completion_tokens"])
        billed.append(reseller.event(answer.headers["x-request-id"]))
    first, second = billed
    text = "one two three four five six"
    by_tokenizer = reseller.services.catalog.first().codec is not None
    expected = count(text) if by_tokenizer else 7
    assert told == [expected, 30]
    assert first["counted_by"] == ("tokenizer" if by_tokenizer else "estimate")
    assert (first["output_tokens"], first["waived_tokens"]) == (expected, 0)
    assert (second["counted_by"], second["output_tokens"]) == ("upstream", 30)


@pytest.mark.parametrize("ending", ["error", "abort", "end"])
async def test_events_that_came_before_the_end_are_all_counted(ending: str) -> None:
    """More than one turn of the event loop parses; the last of them makes the receipt."""
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", a_job(stream=True), mailbox, lambda _: None, count)
    parser.on_headers(200, "text/event-stream")
    lines = [b"data: " + json.dumps(event("word " * 20)).encode() + b"\n\n" for _ in range(500)]
    parser.on_data(b"".join(lines))
    {
        "error": lambda: parser.on_error(OSError("gone")),
        "abort": parser.abort,
        "end": parser.on_end,
    }[ending]()
    assert mailbox.receipt is None, "the events were parsed in one turn"
    text = ""
    with pytest.raises(TollhouseError) if ending == "error" else contextlib.nullcontext():
        while chunks := await mailbox.take():
            text += "".join(chunk.text for chunk in chunks if isinstance(chunk, TextChunk))
    assert text == "word " * 10_000
    receipt = await mailbox.ended(5)
    assert receipt is not None and receipt.generated == pytest.approx(count(text), rel=0.01)


def test_embeddings_have_no_output_whatever_the_report_says() -> None:
    request = InferenceRequest("/v1/embeddings", "m", inputs=["a gate"])
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(max_tokens=1)), request)
    body = {"data": [{"index": 0, "embedding": [0.5]}], "usage": usage(9, 4)}
    pieces = [json.dumps(body).encode()]
    billed, waived, receipt = asyncio.run(
        _bill(pieces, "application/json", tokenizer=False, leaves_after=None, job=job)
    )
    assert (billed, waived, receipt.generated, receipt.prompt) == (0, 0, 0, 7)


class TestATextIsCountedInTurns:
    """The event loop, which all tenants share, tokenizes a bounded part of a text at a time."""

    TEXT = "The road was long and the toll was small, so the carter paid. " * 2_000
    MOST = 20_000  # characters at a time

    def counter(self, cap: int, sizes: list[int]) -> UsageCounter:
        def _count(text: str) -> int:
            sizes.append(len(text))
            return count(text)

        job = a_job(stream=True, max_tokens=cap)
        request = structs.replace(job.request, max_tokens=cap)
        return UsageCounter(Job(job.engine_request, request), _count)

    @pytest.mark.parametrize("pieces", [1, 7, 300])
    def test_no_turn_counts_more_than_a_part(self, pieces: int) -> None:
        sizes: list[int] = []
        usage = self.counter(count(self.TEXT) + 1_000, sizes)
        width = -(-len(self.TEXT) // pieces)
        for start in range(0, len(self.TEXT), width):
            usage.add(0, "text", self.TEXT[start : start + width])
            sizes.clear()
            assert usage.beyond_cap() == 0
            assert sum(sizes) <= self.MOST
        assert usage.receipt(FinishReason.STOP).generated == pytest.approx(
            count(self.TEXT), abs=200
        )

    def test_turns_add_up_to_the_whole(self) -> None:
        sizes: list[int] = []
        tokens = count(self.TEXT)
        usage = self.counter(tokens * 9 // 10, sizes)
        usage.add(0, "text", self.TEXT)
        beyond = [usage.beyond_cap() for _ in range(10)]
        assert beyond[0] == 0
        assert max(beyond) == pytest.approx(len(self.TEXT) / 10, rel=0.1)
        assert usage.receipt(FinishReason.STOP).generated == tokens * 9 // 10
