"""Events that are a piece of text take a short way: it gives what the general parser gives."""

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import TollhouseError
from engine.protocol import GenerateRequest, Receipt, SamplingParams
from gateway.engines.openai_response import ResponseParser
from gateway.request.engine import Job, Mailbox, TextChunk
from gateway.request.inference import InferenceRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
TEXT = st.one_of(st.none(), st.text('ab é漢😀\\"\n', max_size=80), st.just("word " * 70))
DELTA = st.fixed_dictionaries(
    {},
    optional={
        "content": TEXT,
        "role": st.just("assistant"),
        "refusal": st.sampled_from([None, "", "no"]),
        "reasoning_content": st.sampled_from([None, "", "hm"]),
        "tool_calls": st.sampled_from(
            [None, [], [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]]
        ),
    },
)
CHOICE = st.fixed_dictionaries(
    {"delta": DELTA},
    optional={
        "index": st.sampled_from([0, 1, None]),
        "finish_reason": st.sampled_from([None, None, None, "stop", ""]),
        "logprobs": st.sampled_from([None, {"content": []}]),
    },
)
USAGE = st.one_of(
    st.none(),
    st.fixed_dictionaries({"prompt_tokens": st.just(7), "completion_tokens": st.integers(0, 60)}),
)
EVENT = st.fixed_dictionaries(
    {"choices": st.one_of(st.lists(CHOICE, min_size=1, max_size=1), st.lists(CHOICE, max_size=2))},
    optional={
        "usage": USAGE,
        "id": st.just("x"),
        "error": st.sampled_from([None, None, {"message": "no"}]),
    },
)
ODD = st.sampled_from(["[]", "{", '{"choices":[{"delta":{"content":5}}]}', '{"choices":[{}]}', "1"])


class GeneralParser(ResponseParser):
    """Without the short ways."""

    def _take_plain(self, event: bytes) -> bool:
        return False

    def _take_plain_events(self, lines: bytes) -> int:
        return 0


def outcome(
    kind: type[ResponseParser], lines: list[str], reads: list[int], job: Job
) -> tuple[Any, ...]:
    """(text, calls and reason of each choice, tokens to hold money for, receipt, error)."""
    mailbox = Mailbox("r", lambda _: None)
    parser = kind("e", job, mailbox, lambda _: None)
    parser.on_headers(200, "text/event-stream")
    body = "".join(f"data: {line}\n\n" for line in lines).encode()
    edges = sorted({0, len(body), *(min(each, len(body)) for each in reads)})
    for start, end in itertools.pairwise(edges):
        parser.on_data(body[start:end])
    parser.on_end()
    return said(mailbox)


def said(mailbox: Mailbox) -> tuple[Any, ...]:
    texts: dict[int, str] = {}
    others: list[Any] = []
    held = 0
    for chunk in mailbox._chunks:
        assert isinstance(chunk, TextChunk)
        held += chunk.count
        texts[chunk.choice] = texts.get(chunk.choice, "") + chunk.text
        calls = chunk.calls or None  # None and [] mean the same
        if (chunk.finish_reason, chunk.logprobs, calls) != (None, None, None):
            others.append((chunk.choice, chunk.finish_reason, chunk.logprobs, calls, texts))
    receipt: Receipt | None = mailbox.receipt
    error: TollhouseError | None = mailbox._error
    return texts, others, held, receipt, error and (error.code, error.message)


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(st.one_of(EVENT.map(json.dumps), EVENT.map(json.dumps), ODD), max_size=12),
    reads=st.lists(st.integers(0, 2_000), max_size=4),
    done=st.booleans(),
    tools=st.booleans(),
)
def test_it_gives_what_the_general_parser_gives(
    lines: list[str], reads: list[int], done: bool, tools: bool
) -> None:
    request = InferenceRequest(
        "/v1/chat/completions",
        "m",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        n=2,
        tools=[TOOL] if tools else None,
    )
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(500)), request)
    asked = [*lines, "[DONE]"] if done else lines
    assert outcome(ResponseParser, asked, reads, job) == outcome(GeneralParser, asked, reads, job)


@pytest.mark.parametrize(("tools", "chunks"), [(None, 2), ([TOOL], 100)])
async def test_pieces_that_arrive_together_are_one_chunk(
    tools: list[dict[str, Any]] | None, chunks: int
) -> None:
    """Of bounded size, and not with tools: the end of a call ends the choice."""
    messages = [{"role": "user", "content": "Hi"}]
    request = InferenceRequest("/v1/chat/completions", "m", messages=messages, tools=tools)
    job = Job(GenerateRequest("r", "t", [1], SamplingParams(500)), request)
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", job, mailbox, lambda _: None)
    parser.on_headers(200, "text/event-stream")
    line = json.dumps({"choices": [{"index": 0, "delta": {"content": "word "}}]})
    parser.on_data(f"data: {line}\n\n".encode() * 100)
    taken = await mailbox.take()
    assert len(taken) == chunks
    assert "".join(each.text for each in taken if isinstance(each, TextChunk)) == "word " * 100


def test_nothing_of_a_read_is_taken_after_its_client_left() -> None:
    """The first piece is passed on while the read is parsed, and tells that the client is gone."""
    request = InferenceRequest("/v1/chat/completions", "m", messages=[])
    job = Job(GenerateRequest("r", "t", [1], SamplingParams(500)), request)
    mailbox = Mailbox("r", lambda _: None)
    parser = ResponseParser("e", job, mailbox, lambda _: None)
    put = mailbox.put_text

    def _put(choice: int, text: str, tokens: int) -> None:
        put(choice, text, tokens)
        parser._close_once()

    mailbox.put_text = _put  # type: ignore[method-assign]
    parser.on_headers(200, "text/event-stream")
    event = json.dumps({"choices": [{"index": 0, "delta": {"content": "x" * 300}}]})
    parser.on_data(f"data: {event}\n\n".encode() * 4)
    assert [len(each.text) for each in mailbox._chunks if isinstance(each, TextChunk)] == [300]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("odd", ["", ": a comment", "event: message", "data: {}", "data: not JSON"])
def test_long_reads_give_what_the_general_parser_gives(end: str, odd: str) -> None:
    """More than one turn of the event loop parses, with lines between the events that are no text."""
    chance = random.Random(20261126)
    texts = [chance.choice(["word ", "ein paar Wörter ", "x" * 300]) for _ in range(600)]
    lines = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': each}}]})}{end}"
             for each in texts]  # fmt: skip
    if odd:
        lines[100] += odd + end
    body = end.join([*lines, "data: [DONE]" + end, ""]).encode()
    for size in (1_000, 30_000, len(body)):
        reads = [body[at : at + size] for at in range(0, len(body), size)]
        said = [asyncio.run(_streamed(kind, reads)) for kind in (ResponseParser, GeneralParser)]
        assert said[0] == said[1]
        assert said[0][0][0].startswith("".join(texts[:100]))


async def _streamed(kind: type[ResponseParser], reads: list[bytes]) -> tuple[Any, ...]:
    mailbox = Mailbox("r", lambda _: None)
    messages = [{"role": "user", "content": "Hi"}]
    request = InferenceRequest("/v1/chat/completions", "m", messages=messages, stream=True)
    job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(100_000)), request)
    parser = kind("e", job, mailbox, lambda _: None)
    parser.on_headers(200, "text/event-stream")
    for read in reads:
        parser.on_data(read)
    parser.on_end()
    async with asyncio.timeout(5):
        while not mailbox._over:
            await asyncio.sleep(0)
    return said(mailbox)
