"""A provider's stream cut anywhere is the same answer, with the same counts."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Receipt, SamplingParams
from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.parser import PortParser
from gateway.engines.ports.registry import port_of
from gateway.request.engine import GenerateRequest, Job, Mailbox, TextChunk
from gateway.request.inference import InferenceRequest
from tests.gateway.engines.ports.answers import CALLS, MADE, TEXT, Made


def parsed(made: Made, pieces: Sequence[bytes]) -> tuple[list[Any], Receipt]:
    """What a mailbox gets of these reads, its text and arguments joined."""

    async def parse() -> tuple[list[Any], Receipt]:
        options = {"region": "eu-west-1", **made.options}
        fields: Any = {"url": "http://x", "provider": made.name, "api_key": "k", "options": options}
        tools = [{"type": "function", "function": {"name": "weather"}}]
        request = InferenceRequest(
            "/v1/chat/completions", "m", messages=[], tools=tools, stream=True
        )
        job = Job(GenerateRequest("r", "t", [], SamplingParams(max_tokens=1_000)), request)
        mailbox = Mailbox("r", lambda _: None)
        parser = PortParser(port_of(Upstream(**fields)), "e", job, mailbox, lambda _: None)
        parser.on_headers(200, made.stream(True, 0).kind)
        for piece in pieces:
            parser.on_data(piece)
        parser.on_end()
        chunks: list[Any] = []
        while taken := await mailbox.take():
            chunks += taken
        assert mailbox.receipt is not None
        return _joined(chunks), mailbox.receipt

    return asyncio.run(parse())


def _joined(chunks: list[TextChunk]) -> list[Any]:
    text = "".join(each.text for each in chunks)
    reasoning = "".join(each.reasoning for each in chunks)
    calls: dict[int, list[str]] = {}
    for each in chunks:
        for piece in each.calls or ():
            known = calls.setdefault(int(piece["index"]), [""])
            known[0] += str(piece["function"].get("arguments") or "")
    details = [detail for each in chunks for detail in each.details or ()]
    reasons = [each.finish_reason for each in chunks if each.finish_reason]
    return [text, reasoning, list(calls.values()), details, reasons]


@pytest.mark.parametrize("name", MADE)
@given(sizes=st.lists(st.integers(1, 120), min_size=1, max_size=40))
def test_a_stream_cut_anywhere_is_the_same(name: str, sizes: list[int]) -> None:
    made = MADE[name]
    raw = b"".join(made.stream(True, 0).body)
    whole = parsed(made, [raw])
    pieces, at = [], 0
    for size in sizes:
        pieces.append(raw[at : at + size])
        at += size
    pieces.append(raw[at:])
    assert parsed(made, [each for each in pieces if each]) == whole
    said, receipt = whole
    assert (said[0], len(said[2])) == (TEXT, len(CALLS))
    assert said[4] in (["tool_calls"], ["stop"])  # Gemini has one word for both
    assert (receipt.prompt, receipt.cached, receipt.generated) == (
        made.usage.prompt,
        made.usage.read,
        made.usage.output,
    )
