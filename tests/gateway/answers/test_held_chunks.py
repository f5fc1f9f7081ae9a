"""Pieces of an answer wait together until the guard can release some of them, and nobody can tell.

Every case runs twice: with each piece taken alone, and as the gateway does it. After each event of
the upstream the client must have the same bytes, and the records must be the same at the end. What
passes without a step of the delivery has tests of its own, in test_pass_through.py.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import GenerateRequest, Receipt, SamplingParams
from gateway.answers.deadlines import Deadlines
from gateway.answers.delivery import Delivery
from gateway.answers.surface import ResponseInfo
from gateway.engines.http_pool import ServerDisconnected
from gateway.engines.openai_response import ResponseParser
from gateway.formats.chat.response import ChatSurface
from gateway.formats.completions.response import CompletionsSurface
from gateway.formats.messages.response import MessagesSurface
from gateway.formats.responses.response import ResponsesSurface
from gateway.request.engine import Chunk, Job, Mailbox
from gateway.request.inference import InferenceRequest
from gateway.screening.tenant_moderator import ChoiceGuard, GuardedResponse
from moderation.classifiers.load import load_classifier
from moderation.guard import StreamGuard
from moderation.policy import Policy, default_policy
from moderation.screener import Screener
from tests.gateway.answers.test_delivery import Client, Meter, Money, Replica, Route
from tests.moderation.helpers import WordClassifier

SURFACES = (ChatSurface(), CompletionsSurface(), MessagesSurface(), ResponsesSurface())
WORDS = Screener(WordClassifier(violence="poison"))
SHIPPED = Screener(load_classifier())
OUTPUT = {
    "entities": {"card": "redact", "email": "block"},
    "categories": {"violence": {"annotate": 0.5, "redact": 0.9}},
}
GUARDS: dict[str, tuple[Policy, Screener] | None] = {
    "none": None,
    "default": (default_policy(), SHIPPED),
    "redact": (Policy.from_dict({"output": OUTPUT}), WORDS),
    "block": (Policy.from_dict({"output": {"categories": {"violence": {"block": 0.9}}}}), WORDS),
    "full": (Policy.from_dict({"output": OUTPUT, "mode": "full"}), WORDS),
    "async": (Policy.from_dict({"output": OUTPUT, "mode": "async"}), WORDS),
    "rules": (Policy.from_dict({"output": {"entities": {"card": "redact"}}}), Screener()),
}
# What the events of /v1/responses repeat of their request.
EXTRA = ResponsesSurface().parse(b'{"model":"m","input":"Hi","stream":true}').extra
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
PIECES = (
    *("the cat sat ", "on the mat. ", "a", " ", "poison ", "4111 1111 ", "4111 1111 1111 1111 "),
    *("bob@exam", "ple.org ", "é漢😀 ", "\n", "word " * 30, "kill them all and burn the village "),
)
ENDINGS = ("stop", "length", "undone", "cut", "error", "garbage", "leave")


Passed = Callable[[int, str, int], bool]
PassedChunks = Callable[[Sequence[Chunk]], int]


class StepByStep(Mailbox):
    """Which gives all text to the one who takes."""

    @property
    def pass_text(self) -> Passed | None:
        return None

    @pass_text.setter
    def pass_text(self, value: Passed | None) -> None:
        return

    @property
    def pass_chunks(self) -> PassedChunks | None:
        return None

    @pass_chunks.setter
    def pass_chunks(self, value: PassedChunks | None) -> None:
        return


class OneByOne(StepByStep):
    """Whose every piece is taken at once, whatever is needed."""

    async def take(self, needed: int = 1) -> list[Chunk]:
        return await super().take()


class Records(Meter):
    receipt: Receipt | None = None

    async def close(
        self, ending: Any, receipt: Any, _statements: Any = None, *, draft: Any = None
    ) -> Any:
        self.receipt = receipt
        return await super().close(ending, receipt, draft=draft)


class Run:
    def __init__(
        self,
        kind: type[Mailbox],
        surface: Any,
        guard: str,
        choices: int,
        *,
        tools: bool = False,
        logprobs: bool = False,
        money: Money | None = None,
    ) -> None:
        self.client, self.meter = Client(), Records()
        self.verdicts: list[Any] = []
        text = surface.route == "/v1/completions"
        self.request = InferenceRequest(
            surface.route,
            "m",
            messages=None if text else [{"role": "user", "content": "Hi"}],
            prompts=("Hi",) if text else (),
            stream=True,
            n=choices,
            tools=[TOOL] if tools else None,
            logprobs=1 if logprobs else None,
            include_usage=True,
            extra=EXTRA if surface.route == "/v1/responses" else {},
        )
        self.job = Job(GenerateRequest("r", "t", [1] * 7, SamplingParams(5_000)), self.request)
        self.parser: ResponseParser | None = None
        self.mailbox = kind("r", lambda _: self.parser.abort() if self.parser else None)
        self.parser = ResponseParser("e", self.job, self.mailbox, lambda _: None)
        self.parser.on_headers(200, "text/event-stream")
        self.delivery = Delivery(
            surface,
            self.client,  # type: ignore[arg-type]
            self.request,
            ResponseInfo("req_1", 0, "m", None, 7),
            guards=self._guards(guard, choices),
            meter=self.meter,  # type: ignore[arg-type]
            reservation=money or Money(),
            headers=list,
            keep_alive_s=60.0,
            deadlines=Deadlines(),
        )

    def _guards(self, name: str, choices: int) -> Callable[[], Sequence[ChoiceGuard]]:
        chosen = GUARDS[name]
        if chosen is None:
            return lambda: ()
        policy, screener = chosen

        def _record(verdict: Any, text: str) -> None:
            self.verdicts.append((verdict, text))

        answer = GuardedResponse(StreamGuard(policy, screener), policy, _record)
        return lambda: [ChoiceGuard(answer, choice) for choice in range(choices)]

    async def seen(
        self, events: Sequence[bytes], ending: str, *, slow: Sequence[bool] = ()
    ) -> list[Any]:
        """What the client has after each event; then the status or error, and the records. `slow`:
        whether it still has to read what came before, for the first events."""
        route = Route(Replica("one", self.mailbox))  # type: ignore[arg-type]
        task = asyncio.ensure_future(self.delivery.run(route, self.job))  # type: ignore[arg-type]
        await _settled()
        assert self.parser is not None
        steps: list[Any] = []
        for number, event in enumerate(events):
            self.client.writable = not (number < len(slow) and slow[number])
            self.parser.on_data(event)
            await _settled()
            steps.append(b"".join(self.client.sent))
        if ending == "leave":
            self.client.disconnected = True
            self.client.leave()
        elif ending == "cut":
            self.parser.on_error(ServerDisconnected("cut"))
        else:
            self.parser.on_end()
        (outcome,) = await asyncio.gather(task, return_exceptions=True)
        closed = [vars_of(each) for each in self.meter.closed]
        if ending == "leave":  # what was still held when the client left is not read any more
            closed = [{**each, "seen": 0} for each in closed]
        else:
            steps.append(self.verdicts)
        error = (type(outcome), str(outcome)) if isinstance(outcome, Exception) else outcome
        sent = (b"".join(self.client.sent), self.client.last, self.client.status)
        return [*steps, sent, error, closed, self.meter.receipt, self.meter.moderation]


async def _settled() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def vars_of(ending: Any) -> dict[str, Any]:
    return {name: getattr(ending, name) for name in ending.__struct_fields__}


def event_of(surface: Any, piece: str, choice: int, *, logprobs: bool, reason: str | None) -> bytes:
    given: dict[str, Any] = {"index": choice, "finish_reason": reason}
    given |= (
        {"text": piece} if surface.route == "/v1/completions" else {"delta": {"content": piece}}
    )
    if logprobs and piece:
        entry = {"token": piece, "logprob": -1.0, "bytes": None, "top_logprobs": []}
        given["logprobs"] = {"content": [entry]}
    return b"data: " + json.dumps({"id": "x", "choices": [given]}).encode() + b"\n\n"


def last_events(surface: Any, ending: str, choices: int) -> list[bytes]:
    if ending in ("stop", "length"):
        ends = [
            event_of(surface, "", number, logprobs=False, reason=ending)
            for number in range(choices)
        ]
        usage = {"prompt_tokens": 7, "completion_tokens": 9}
        told = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        return [*ends, told, b"data: [DONE]\n\n"]
    if ending == "error":
        return [b'data: {"error":{"message":"no","code":500}}\n\n']
    return [b"data: {garbage\n\n"] if ending == "garbage" else []


def cut_up(body: bytes, places: Sequence[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(min(each, len(body)) for each in places)})
    return [body[start:end] for start, end in pairwise(edges)]


@settings(max_examples=250, deadline=None)
@given(
    surface=st.sampled_from(SURFACES),
    guard=st.sampled_from(sorted(GUARDS)),
    pieces=st.lists(st.tuples(st.sampled_from(PIECES), st.integers(0, 1)), max_size=40),
    choices=st.sampled_from([1, 1, 1, 2]),
    tools=st.booleans(),
    told=st.lists(st.booleans(), min_size=40, max_size=40),
    ending=st.sampled_from(ENDINGS),
    reads=st.none() | st.lists(st.integers(0, 4_000), max_size=6),
)
async def test_the_client_and_the_records_cannot_tell(
    *,
    surface: Any,
    guard: str,
    pieces: list[tuple[str, int]],
    choices: int,
    tools: bool,
    told: list[bool],
    ending: str,
    reads: list[int] | None,
) -> None:
    text = surface.route == "/v1/completions"
    choices = choices if text or surface.route.endswith("chat/completions") else 1
    tools = tools and not text
    logprobs = any(told[:3])
    events = [
        event_of(surface, piece, at % choices, logprobs=logprobs and told[number], reason=None)
        for number, (piece, at) in enumerate(pieces)
    ]
    events += last_events(surface, ending, choices)
    if reads is not None:
        events = cut_up(b"".join(events), reads)
    alone, together = [
        await Run(kind, surface, guard, choices, tools=tools, logprobs=logprobs).seen(
            events, ending
        )
        for kind in (OneByOne, StepByStep)
    ]
    assert together == alone


@pytest.mark.parametrize("guard", ["default", "redact", "full"])
async def test_a_guarded_stream_takes_few_turns(guard: str) -> None:
    """Fewer than a sixth of its pieces: the rest wait with others until the guard looks again, and pass
    in the turn in which they were read where it only looks."""
    surface, taken = ChatSurface(), list[int]()

    class Counted(Mailbox):
        async def take(self, needed: int = 1) -> list[Chunk]:
            chunks = await super().take(needed)
            taken.append(len(chunks))
            return chunks

    events = [
        event_of(surface, f"word{number % 7} ", 0, logprobs=False, reason=None)
        for number in range(200)
    ]
    await Run(Counted, surface, guard, 1).seen([*events, *last_events(surface, "stop", 1)], "stop")
    assert len(taken) < 200 / 6
