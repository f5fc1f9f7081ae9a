"""No field of any answer holds a character that the output guard removed.

The secrets are of an alphabet that nothing else uses, so the oracle is: no character of that
alphabet occurs anywhere in the answer, in whatever field, event or list of bytes.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import orjson
import pytest
from hypothesis import given, settings

from engine.demo.paths import MODEL_DIR
from engine.protocol import FinishReason, TokenChunk, TokenLogprob
from gateway.answers.choices import ChoiceOutput
from gateway.answers.chunks import group_chunks
from gateway.answers.reasoning import reader_for
from gateway.answers.surface import ResponseInfo, Surface
from gateway.catalog.codec.tokenizing import load_codec
from gateway.formats.chat.response import ChatSurface
from gateway.formats.completions.response import CompletionsSurface
from gateway.formats.messages.response import MessagesSurface
from gateway.formats.responses.response import ResponsesSurface
from gateway.request.engine import Chunk, TextChunk
from gateway.request.inference import InferenceRequest, Usage
from gateway.screening.tenant_moderator import ChoiceGuard, GuardedResponse
from moderation.guard import StreamGuard
from moderation.policy import Policy
from moderation.screener import Screener

CODEC = load_codec(MODEL_DIR)
SURFACES: list[Surface] = [
    ChatSurface(),
    CompletionsSurface(),
    MessagesSurface(),
    ResponsesSurface(),
]
SECRET = "㐀㐁㐂㐃㐄㐅"  # no other text of these tests has these characters
PATTERN = {"name": "secret", "pattern": "[㐀-㐅]+", "longest": 64}
TOOLS = [{"type": "function", "function": {"name": "send", "parameters": {"type": "object"}}}]
EXTRA = {
    "instructions": None,
    "labels": {},
    "metadata": {},
    "parallel_tool_calls": True,
    "tools": [],
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
}
words = st.sampled_from(["Hello ", "the ", "é", "toll. ", "\n", "🙂", "END", "x" * 40 + " "])
secrets = st.text(SECRET, min_size=1, max_size=8)
texts = st.lists(words | secrets, min_size=1, max_size=12).map("".join)


@dataclass(frozen=True)
class Case:
    surface: Surface
    stream: bool
    action: str
    tools: bool = False
    stops: tuple[str, ...] = ()


cases = st.builds(
    Case,
    st.sampled_from(SURFACES),
    st.booleans(),
    st.sampled_from(["redact", "block"]),
    st.booleans(),
    st.sampled_from([(), ("END",)]),
)


def leaks(value: Any) -> bool:
    """Whether any text of an answer holds a character of a secret, also in lists of bytes and in the
    texts of neighbouring tokens together."""
    return any(set(SECRET) & set(text) for text in strings_of(value))


def strings_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
        if value[:1] in '{["':
            try:
                yield from strings_of(json.loads(value)) if value[:1] != '"' else ()
            except ValueError:
                return
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_of(inner)
    elif isinstance(value, list):
        yield joined(value).decode("utf-8", "replace")
        for inner in value:
            yield from strings_of(inner)


def joined(listed: Sequence[Any]) -> bytes:
    """A list of bytes, or the bytes of a list of tokens, one after the other."""
    if all(isinstance(each, int) and 0 <= each < 256 for each in listed):
        return bytes(listed)
    parts = [each.get("bytes") for each in listed if isinstance(each, dict)]
    return b"".join(bytes(part) for part in parts if isinstance(part, list))


def run(case: Case, chunks: Sequence[Chunk], sizes: Sequence[int]) -> list[Any]:
    """The JSON answer, or all events of the stream and what they say together."""
    policy = Policy.from_dict({"output": {"patterns": [{**PATTERN, "action": case.action}]}})
    guarded = GuardedResponse(StreamGuard(policy, Screener()), policy, lambda _v, _t: None)
    request = InferenceRequest(
        route=case.surface.route,
        model="m",
        messages=[{"role": "user", "content": "Hi"}],
        prompts=("Hi",),
        tools=TOOLS if case.tools else None,
        logprobs=3,
        stop=case.stops,
        stream=case.stream,
        extra=EXTRA,
    )
    own = isinstance(chunks[0], TokenChunk)
    codec = CODEC if own else None
    info = ResponseInfo("req_1", 0, "m", codec, 3)
    choice = ChoiceOutput(
        0, codec, case.stops if own else (), ChoiceGuard(guarded, 0), reader_for(request)
    )
    writer = case.surface.stream(info, request) if case.stream else None
    sent = writer.begin() if writer else b""
    left = list(chunks)
    for size in [*sizes, len(left)]:
        batch, left = left[:size], left[size:]
        for each in group_chunks(batch):
            choice.feed_run(each)
        if writer is not None and (delta := choice.take()) is not None:
            sent += writer.delta(delta)
        if choice.over:
            break
    asyncio.run(choice.resolve())
    if writer is None:
        answer = case.surface.answer(info, request, [choice], Usage(1, 0, 1))
        return [orjson.loads(orjson.dumps(answer))]
    sent += writer.end(Usage(1, 0, 1), [choice])
    lines = [line for line in sent.decode().splitlines() if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    tokens = [each for event in events for each in tokens_of(event)]
    return [*events, tokens]


def tokens_of(event: Any) -> list[Any]:
    """Entries of log probabilities anywhere in an event."""
    if isinstance(event, dict):
        if "token" in event:
            return [event]
        return [each for inner in event.values() for each in tokens_of(inner)]
    return [each for inner in event for each in tokens_of(inner)] if isinstance(event, list) else []


def own_chunks(text: str) -> list[Chunk]:
    ids = CODEC.encode(text)
    found: list[Chunk] = []
    for place, token in enumerate(ids):
        others = [ids[place - 1], ids[(place + 1) % len(ids)]]
        top = ((token, -0.1), *((other, -1.0) for other in others if other not in hidden(ids)))
        last = FinishReason.STOP if place == len(ids) - 1 else None
        found.append(TokenChunk("r", 0, [token], [TokenLogprob(token, -0.1, top)], last))
    return found


def hidden(ids: list[int]) -> set[int]:
    """Tokens of which one alone is no rule's match, though it is a part of a secret."""
    return {each for each in ids if "\ufffd" in CODEC.token_text(each)}


def upstream_chunks(text: str) -> list[Chunk]:
    """As OpenAI's API streams: the text of a character comes with its last token."""
    found: list[Chunk] = []
    for character in text:
        raw = character.encode()
        halves = [raw[:1], raw[1:]] if len(raw) > 1 else [raw]
        entries = [
            {
                "token": half.decode("utf-8", "backslashreplace"),
                "logprob": -0.1,
                "bytes": list(half),
                "top_logprobs": [{"token": SECRET[:2], "logprob": -2.0, "bytes": None}],
                "note": SECRET,
            }
            for half in halves
        ]
        for entry in entries[:-1]:
            found.append(TextChunk("r", 0, "", 0, logprobs={"content": [entry]}))
        found.append(TextChunk("r", 0, character, 1, logprobs={"content": [entries[-1]]}))
    return [*found, TextChunk("r", 0, "", 0, SECRET)]


@settings(max_examples=80, deadline=None)
@given(cases, texts, st.booleans(), st.lists(st.integers(1, 9), max_size=20))
def test_no_field_holds_what_the_guard_removed(
    case: Case, text: str, own: bool, sizes: list[int]
) -> None:
    chunks = own_chunks(text) if own else upstream_chunks(text)
    for part in run(case, chunks, sizes):
        assert not leaks(part), part


@settings(max_examples=40, deadline=None)
@given(cases, st.sampled_from(["plain", "escaped"]), secrets, st.lists(st.integers(1, 9)))
def test_no_tool_call_holds_what_the_guard_removed(
    case: Case, spelled: str, secret: str, sizes: list[int]
) -> None:
    arguments = json.dumps({"to": f"x {secret} y"}, ensure_ascii=spelled == "escaped")
    call = f'<tool_call>{{"name": "send", "arguments": {arguments}}}</tool_call>'
    tools = Case(case.surface, case.stream, case.action, tools=True)
    for part in run(tools, own_chunks(call), sizes):
        assert not leaks(part), part


@pytest.mark.parametrize("surface", SURFACES[:2] + SURFACES[3:], ids=lambda each: str(each.route))
@pytest.mark.parametrize("own", [True, False], ids=["own", "upstream"])
def test_tokens_of_kept_text_keep_their_log_probabilities(surface: Surface, own: bool) -> None:
    """Chat and responses pass an upstream's entries on; completions has those of own engines only."""
    text = f"Hello there {SECRET} and é"
    chunks = own_chunks(text) if own else upstream_chunks(text)
    answer = str(run(Case(surface, False, "redact"), chunks, ()))
    assert "[PATTERN]" in answer
    if own or surface.route != "/v1/completions":
        assert "'logprob': -0.1" in answer or "'token_logprobs': [-0.1" in answer
