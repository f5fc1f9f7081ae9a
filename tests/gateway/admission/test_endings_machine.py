"""Counters equal ledger, whatever the surface, the kind of upstream and the ending: a state machine
over an upstream, on a real socket, that cuts, merges, delays and misreports its chunks.

The oracle is the sum over usage events that `test_conservation` computes from the price; where the
upstream's report is honest and the answer was read, the event says what the upstream said; where the
client left, the event charges the tokens of the characters that the client had, rounded down.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from core.events import UsageEvent
from gateway.catalog.upstreams import Upstream
from gateway.formats.registry import inference_surfaces
from tests.gateway.admission.endings import SECOND, Ending, Gateway
from tests.gateway.admission.test_conservation import expected
from tests.gateway.scripted_upstream import (
    ENDINGS,
    PER_WORD,
    PROMPT,
    REFUSALS,
    REPORTS,
    WORD,
    Plan,
    ScriptedUpstream,
)

# The upstream has no scores: rerank and score are the built-in engine's.
_OF_SCORES = ("/v1/rerank", "/v1/score")
SURFACES = {each.route: each for each in inference_surfaces() if each.route not in _OF_SCORES}
KINDS = {
    "counted": {"tokenizer": "yes"},
    "estimated": {},
    "vllm": {"tokenizer": "yes", "engine": "vllm"},
    "llama": {"engine": "llama.cpp"},
}
HONEST = ("late", "last", "every")
MOST = 60  # tokens
TIMEOUT_MS = 150  # of what never ends


@dataclass(frozen=True)
class Request:
    route: str
    model: str
    stream: bool
    plan: Plan
    leaves_after: int = -1  # writes of the answer; -1: the client stays
    hurry: bool = False  # a time-out that comes while the answer does
    lag_ms: int = 0  # that the client takes to leave, while more of the answer arrives


PLANS = st.builds(
    Plan,
    words=st.integers(0, 12),
    merge=st.integers(1, 5),
    piece=st.sampled_from([0, 0, 1, 7, 40]),
    delay_ms=st.sampled_from([0, 0, 0, 1]),
    report=st.sampled_from(REPORTS),
    ending=st.sampled_from([*ENDINGS, "stop", "stop", *REFUSALS]),
)
REQUESTS = st.builds(
    Request,
    route=st.sampled_from(sorted(SURFACES)),
    model=st.sampled_from([*KINDS, SECOND]),
    stream=st.booleans(),
    plan=PLANS,
    leaves_after=st.sampled_from([-1, -1, -1, 0, 1, 2, 5]),
    hurry=st.sampled_from([False, False, False, True]),
)
FAITHFUL = st.builds(
    Request,
    route=st.sampled_from([route for route in sorted(SURFACES) if "embed" not in route]),
    model=st.sampled_from(sorted(KINDS)),
    stream=st.just(False),
    plan=st.builds(
        Plan,
        words=st.integers(1, 12),
        merge=st.integers(1, 5),
        piece=st.sampled_from([0, 1, 9]),
        report=st.sampled_from([*HONEST, "none"]),
        ending=st.sampled_from(["stop", "length"]),
    ),
)
LEFT = st.builds(
    Request,
    route=st.sampled_from([route for route in sorted(SURFACES) if "embed" not in route]),
    model=st.sampled_from(sorted(KINDS)),
    stream=st.just(True),
    plan=st.builds(
        Plan,
        words=st.integers(4, 12),
        merge=st.integers(1, 2),
        piece=st.sampled_from([0, 30]),
        delay_ms=st.just(1),
        report=st.just("every"),
        ending=st.sampled_from(["stop", "silent"]),
    ),
    leaves_after=st.integers(0, 4),
    lag_ms=st.sampled_from([0, 4, 8]),
)


class Reader(Ending):
    """A client that may go away after some writes; `ending` writes the rest unread."""

    leaves_after = -1
    lag_ms = 0
    writes = 0
    read = b""

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self.writes += 1
        self.read += data
        await asyncio.sleep(0)
        if self.writes > self.leaves_after >= 0:
            if self.lag_ms:
                await asyncio.sleep(self.lag_ms / 1000)
            self.leave()

    def text(self) -> str:
        """Of a stream of any surface, as far as it came."""
        lines = [line[6:] for line in self.read.split(b"\n") if line.startswith(b"data: {")]
        return "".join(text_of(json.loads(line)) for line in lines)


def text_of(event: dict[str, Any]) -> str:
    if "type" not in event:
        choices = event.get("choices") or [{}]
        return (choices[0].get("delta") or {}).get("content") or choices[0].get("text") or ""
    if event["type"] == "content_block_delta":
        return str(event["delta"].get("text", ""))
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


class Rig:
    """The gateway and its upstream, for all examples."""

    def __init__(self, directory: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = ScriptedUpstream()
        url = self.loop.run_until_complete(self.server.start())
        self.gateway = Gateway(
            directory,
            [
                Upstream(url, name, name, capabilities=("embeddings",), shared_cache=True, **fields)
                for name, fields in KINDS.items()
            ],
        )
        self.numbers = itertools.count()
        self.in_proportion = 0  # answers of which a part was delivered and billed
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        for engine in self.gateway.upstreams:
            await engine.start()

    def close(self) -> None:
        async def _close() -> None:
            for engine in self.gateway.upstreams:
                await engine.close()
            await self.server.close()

        self.loop.run_until_complete(_close())
        self.gateway.close()
        self.loop.close()

    async def ask(self, request: Request) -> Reader:
        timeout_ms = TIMEOUT_MS if request.plan.ending == "silent" else 20_000
        exchange = Reader(
            self.gateway.principal, self._body(request), 15 if request.hurry else timeout_ms
        )
        exchange.leaves_after, exchange.lag_ms = request.leaves_after, request.lag_ms
        for engine in self.gateway.engines.values():
            engine.how, engine.tokens = "ok", max(1, request.plan.words)
        for replica in self.gateway.services.router.replicas():
            replica.answered(self.gateway.principal.tenant_id)
        before = len(self.events())
        await self.gateway.services.pipeline.serve(SURFACES[request.route], exchange)
        if exchange.status in (400, 404) and len(self.events()) == before:
            self.gateway.refused += 1
        return exchange

    def _body(self, request: Request) -> dict[str, Any]:
        text = f"request {next(self.numbers)} {request.plan}"
        body: dict[str, Any] = {"model": request.model}
        if "embeddings" in request.route:
            return body | {"input": [text]}
        body["stream"] = request.stream
        if "responses" in request.route:
            return body | {"input": text, "max_output_tokens": MOST}
        said = {"messages": [{"role": "user", "content": text}]}
        body |= {"prompt": text} if request.route == "/v1/completions" else said
        return body | {"max_tokens": MOST}

    def events(self) -> list[UsageEvent]:
        return self.gateway.events()


class Machine(RuleBasedStateMachine):
    rig: Rig

    @rule(request=REQUESTS)
    def one(self, request: Request) -> None:
        self.rig.loop.run_until_complete(self.rig.ask(request))

    @rule(requests=st.lists(REQUESTS, min_size=2, max_size=5))
    def several_at_once(self, requests: list[Request]) -> None:
        async def _together() -> None:
            await asyncio.gather(*map(self.rig.ask, requests))

        self.rig.loop.run_until_complete(_together())

    @rule(request=FAITHFUL)
    def streamed_and_whole(self, request: Request) -> None:
        """Cost the same, and what an honest report says."""
        before = len(self.rig.events())
        for stream in (False, True):
            asked = Request(request.route, request.model, stream, request.plan)
            answer = self.rig.loop.run_until_complete(self.rig.ask(asked))
            assert answer.status == 200, (asked, answer.status)
        whole, streamed = self.rig.events()[before:]
        assert whole.output_tokens == streamed.output_tokens > 0
        assert whole.waived_tokens == streamed.waived_tokens == 0
        if request.plan.report in HONEST:
            assert whole.output_tokens == request.plan.tokens
            assert whole.input_tokens == streamed.input_tokens == PROMPT

    @rule(request=LEFT)
    def left_in_the_answer(self, request: Request) -> None:
        """Each event of the upstream reports honestly, so so many characters are so many tokens."""
        answer = self.rig.loop.run_until_complete(self.rig.ask(request))
        assert answer.status == 200, request
        event = self.rig.events()[-1]
        delivered = PER_WORD * len(answer.text()) // len(WORD)
        assert event.output_tokens == delivered, (request, event, answer.text())
        if event.waived_tokens and delivered:
            self.rig.in_proportion += 1

    @invariant()
    def the_counters_keep_what_the_events_charge(self) -> None:
        async def _check() -> None:
            gateway = self.rig.gateway
            assert await gateway.kept() == expected(gateway.events(), gateway.refused)
            assert await gateway.held() == (0, 0)
            assert not gateway.services.spool.file.open_requests()
            for event in gateway.events():  # no answer has more bytes, whatever is reported
                assert event.output_tokens + event.waived_tokens <= MOST

        self.rig.loop.run_until_complete(_check())


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("machine"))
    yield made
    made.close()


def test_every_ending_on_every_surface(rig: Rig) -> None:
    Machine.rig = rig
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=6,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    events = rig.events()
    assert {event.route for event in events} == set(SURFACES)
    assert {event.model for event in events} >= set(KINDS)
    seen = {event.finish_reason for event in events}
    assert {"stop", "length", "client_closed", "deadline_exceeded"} <= seen, seen
    assert rig.in_proportion  # how many depends on the machine's speed
