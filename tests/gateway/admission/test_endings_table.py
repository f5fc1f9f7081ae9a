"""What a client gets and pays, by how its request ends: upstreams that misbehave, money that ends,
drains, revocations, clients that leave and faults of our own, on every surface, streamed and whole.

The right-hand side is written by hand. The upstream says seven tokens for each prompt and three for
each word, so the client's own count of words is the bill's; after all rows the audit is clean.
"""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from billing.audit import reconcile
from billing.rating.rating_worker import rate_all
from core.errors import Unauthenticated, Unavailable
from core.events import UsageEvent
from gateway.admission.estimates import OutputEstimates
from gateway.admission.prices import CostBounds
from gateway.admission.request import AdmissionRequest, MoneyLimit
from gateway.answers.deadlines import shutting_down
from gateway.catalog.upstreams import Upstream
from gateway.formats.registry import inference_surfaces
from tests.gateway.admission.endings import OUTPUT, Ending, Gateway
from tests.gateway.admission.test_conservation import expected
from tests.gateway.admission.test_endings_machine import text_of
from tests.gateway.scripted_upstream import PER_WORD, PROMPT, WORD, Plan, ScriptedUpstream

TEXT = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
EMBEDDINGS = "/v1/embeddings"
SURFACES = {each.route: each for each in inference_surfaces()}
UPSTREAM = "capped"
CAP = 60  # max_tokens of every request


@dataclass(frozen=True)
class Got:
    """What the client has, and what the usage event says."""

    status: int  # of HTTP
    code: str  # of the error, or the finish reason of an answer
    words: int  # that the client has
    input: int | None  # None: as the gateway estimates it
    output: int
    waived: int | None  # None: as much as the upstream had sent by then
    reason: str  # of the event


def failed(status: int, code: str, waived: int = 0) -> Got:
    """An error, and nothing else."""
    return Got(status, code, 0, 0, 0, waived, code)


def broken(code: str, words: int = 4, waived: int | None = 0, reason: str = "") -> Got:
    """A stream that has begun, and ends with an error event."""
    return Got(200, code, words, PROMPT, words * PER_WORD, waived, reason or code)


def answer(reason: str, words: int = 4) -> Got:
    return Got(200, reason, words, PROMPT, words * PER_WORD, 0, reason)


@dataclass(frozen=True)
class Row:
    """`plan`: what the upstream does. `act`: what happens once two words are sent, or, to a request
    that is not streamed, once the upstream has it."""

    plan: Plan
    whole: Got
    stream: Got
    act: str = ""
    tokens: int = 0  # that the money covers; 0: all


def every(ending: str, words: int = 4, delay_ms: int = 0) -> Plan:
    return Plan(words=words, report="every", ending=ending, delay_ms=delay_ms)


SLOW = every("stop", 12, 8)  # time to act in
NOBODY = Got(0, "", 0, PROMPT, 0, None, "client_closed")
ROWS = {
    "stop": Row(every("stop"), answer("stop"), answer("stop")),
    "length": Row(every("length"), answer("length"), answer("length")),
    "400": Row(every("refused"), failed(400, "upstream_refused"), failed(400, "upstream_refused")),
    "404": Row(every("gone"), failed(400, "upstream_refused"), failed(400, "upstream_refused")),
    "429": Row(every("busy"), failed(429, "upstream_busy"), failed(429, "upstream_busy")),
    "500": Row(every("down"), failed(503, "engine_failed"), failed(503, "engine_failed")),
    "an error body with 200": Row(
        every("body"), failed(503, "engine_failed"), failed(503, "engine_failed")
    ),
    "no choices": Row(
        every("none"), failed(503, "engine_unavailable"), failed(503, "engine_failed")
    ),
    "finish_reason error": Row(
        every("failed", delay_ms=5), failed(503, "engine_failed", 12), broken("engine_failed")
    ),
    "an error event": Row(every("error"), failed(503, "engine_failed"), broken("engine_failed")),
    "garbage": Row(
        every("garbage"), failed(503, "engine_unavailable"), broken("engine_unavailable")
    ),
    "a reset": Row(every("cut"), failed(503, "engine_unavailable"), broken("engine_unavailable")),
    "no end": Row(every("undone"), answer("stop"), broken("engine_failed")),
    "a hang": Row(every("silent"), failed(503, "deadline_exceeded"), broken("deadline_exceeded")),
    "max_tokens ignored": Row(every("stop", 40), answer("length", 20), answer("length", 20)),
    "max_tokens ignored, counted at the end": Row(
        Plan(words=120, report="late"),
        answer("length", 20),
        Got(200, "length", 60, None, 60, None, "length"),
    ),
    "no money": Row(
        every("stop"),
        failed(429, "insufficient_quota"),
        failed(429, "insufficient_quota"),
        tokens=9,
    ),
    "money ends": Row(
        SLOW,
        failed(429, "insufficient_quota", 36),
        broken("insufficient_quota", 6, None),
        tokens=18,
    ),
    "no counters": Row(
        SLOW,
        failed(503, "limits_unavailable", 36),
        broken("limits_unavailable", 3, None),
        act="counters",
        tokens=36,
    ),
    "a drain": Row(SLOW, failed(503, "draining"), broken("draining", 2, None), act="drain"),
    "a revocation": Row(
        SLOW, failed(401, "invalid_api_key"), broken("invalid_api_key", 2, None), act="revoke"
    ),
    "a client that leaves": Row(
        SLOW,
        replace(NOBODY, input=None),
        replace(NOBODY, status=200, words=2, output=6),
        act="leave",
    ),
    "a fault of ours": Row(
        SLOW,
        failed(500, "internal_error", 36),
        broken("internal_error", 2, None, "gateway_fault"),
        act="fault",
    ),
}
ROWS["a fault of ours"] = replace(
    ROWS["a fault of ours"],
    whole=replace(ROWS["a fault of ours"].whole, reason="gateway_fault"),
)


class Faulty:
    """A surface that cannot write a whole answer, or more than two pieces of a stream."""

    def __init__(self, surface: Any) -> None:
        self._surface = surface

    def __getattr__(self, name: str) -> Any:
        return getattr(self._surface, name)

    def answer(self, *_given: Any) -> dict[str, Any]:
        raise ZeroDivisionError

    def stream(self, *given: Any) -> Any:
        writer, written = self._surface.stream(*given), [0]
        plain = writer.delta

        def _delta(delta: Any) -> Any:
            written[0] += 1
            if written[0] > 2:
                raise ZeroDivisionError
            return plain(delta)

        writer.delta = _delta
        return writer


class Client(Ending):
    """Reads an answer of any surface, and does what its row says in the middle."""

    def __init__(self, gateway: Gateway, principal: Any, body: dict[str, Any], row: Row) -> None:
        silent = row.plan.ending == "silent"
        super().__init__(principal, body, 150 if silent else 20_000)
        self.read, self.pieces, self.last = b"", 0, False
        self._act = row.act
        self._gateway = gateway

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self.read += data
        self.last = not more
        self.pieces += WORD.encode() in data
        if self.pieces == 2 and self._act:
            self.act()

    def act(self) -> None:
        act, self._act = self._act, ""
        running = self._gateway.services.pipeline.responses.deadlines
        if act == "leave":
            self.leave()
        elif act == "drain":
            running.end(shutting_down())
        elif act == "revoke":
            error = Unauthenticated("This API key was revoked.")
            assert running.end(error, lambda each: each.key_id == self.principal.key_id) == 1

    @property
    def events(self) -> list[dict[str, Any]]:
        lines = [line[6:] for line in self.read.split(b"\n") if line.startswith(b"data: {")]
        return [json.loads(line) for line in lines]

    @property
    def words(self) -> int:
        """The client's own count."""
        if not self.streamed:
            return self.read.count(WORD.encode())
        return sum(text_of(event).count(WORD) for event in self.events)

    @property
    def streamed(self) -> bool:
        return self.read.startswith((b"data:", b"event:", b"retry:"))


def code_of(client: Client) -> str:
    """The error's code (on Messages its type), or the finish reason of an answer."""
    if not client.streamed:
        return _of_whole(json.loads(client.read or b"{}"))
    found = ""
    for event in client.events:
        found = _of_event(event) or found
    return found


def _of_whole(body: dict[str, Any]) -> str:
    if body.get("error"):
        return str(body["error"].get("code") or body["error"]["type"])
    if "choices" in body:
        return str(body["choices"][0]["finish_reason"])
    if "stop_reason" in body:
        return {"end_turn": "stop", "max_tokens": "length"}[body["stop_reason"]]
    if "status" in body:
        return {"completed": "stop", "incomplete": "length"}[body["status"]]
    return "stop" if "data" in body else ""


def _of_event(event: dict[str, Any]) -> str:
    kind = event.get("type", "")
    if event.get("error"):
        return str(event["error"].get("code") or event["error"]["type"])
    if kind == "error":
        return str(event["code"])
    if kind in ("response.completed", "response.incomplete", "response.failed"):
        response = event["response"]
        return str((response.get("error") or {}).get("code") or _of_whole(response))
    if kind == "message_delta":
        return _of_whole(event["delta"])
    choices = event.get("choices") or [{}]
    return str(choices[0].get("finish_reason") or "")


class Bounded:
    """Admission under one more money limit, which covers the prompt and so many output tokens."""

    def __init__(self, gateway: Gateway, tokens: int, key: str) -> None:
        self._services, self._clock = gateway.services, gateway.clock
        self._tokens, self._key = tokens, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services.limiter, name)

    def begin_tier(self, _ctx: Any) -> None:
        return

    async def reserve(self, request: AdmissionRequest) -> Any:
        quote = await self._services.prices.quote(request, self._clock.now())
        base, each = CostBounds().of(quote.price, request)
        assert each == OUTPUT
        limit = MoneyLimit(self._key, base + self._tokens * each, 0)
        money = (*quote.money, limit)
        held = await self._services.limiter.reserve(
            msgspec.structs.replace(
                request, money=money, base_cost_units=base, output_cost_units=each
            )
        )
        held.price = quote.price
        return held


async def _away(*_given: Any) -> int:
    raise Unavailable("The counters do not answer.")


class Rig:
    def __init__(self, directory: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = ScriptedUpstream()
        url = self.loop.run_until_complete(self.server.start())
        fields: dict[str, Any] = {"capabilities": ("embeddings",), "shared_cache": True}
        self.gateway = Gateway(directory, [Upstream(url, UPSTREAM, UPSTREAM, **fields)])
        (self.engine,) = self.gateway.upstreams
        self.loop.run_until_complete(self.engine.start())
        self.numbers = iter(range(10**6))

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.close())
        self.loop.run_until_complete(self.server.close())
        self.gateway.close()
        self.loop.close()

    def ask(self, row: Row, route: str, *, stream: bool) -> tuple[Client, list[UsageEvent]]:
        return self.loop.run_until_complete(self._ask(row, route, stream=stream))

    async def _ask(self, row: Row, route: str, *, stream: bool) -> tuple[Client, list[UsageEvent]]:
        gateway, before = self.gateway, len(self.gateway.events())
        services = gateway.services
        plan = replace(gateway.principal.plan, expected_output=10)
        principal = replace(gateway.principal, plan=plan)
        client = Client(gateway, principal, self._body(row, route, stream=stream), row)
        for replica in services.router.replicas():
            replica.answered(principal.tenant_id)
        surface: Any = Faulty(SURFACES[route]) if row.act == "fault" else SURFACES[route]
        admission, asked = services.pipeline.admission, self.server.asked
        if row.tokens:
            services.limiter._estimates = OutputEstimates()  # of no earlier row
            bounded = Bounded(gateway, row.tokens, f"row-{next(self.numbers)}")
            services.pipeline.admission = bounded  # type: ignore[assignment]
        if row.act == "counters":
            services.counters.extend = _away  # type: ignore[method-assign]
        task = asyncio.ensure_future(services.pipeline.serve(surface, client))
        if row.act and not stream:
            while self.server.asked == asked and not task.done():
                await asyncio.sleep(0.001)
            client.act()
        await task
        services.pipeline.admission = admission
        if row.act == "counters":
            del services.counters.extend  # type: ignore[misc]
        return client, gateway.events()[before:]

    def _body(self, row: Row, route: str, *, stream: bool) -> dict[str, Any]:
        text = f"request {next(self.numbers)} {row.plan}"
        if route == EMBEDDINGS:
            return {"model": UPSTREAM, "input": [text]}
        body: dict[str, Any] = {"model": UPSTREAM, "stream": stream}
        if route == "/v1/responses":
            return body | {"input": text, "max_output_tokens": CAP}
        said = {"messages": [{"role": "user", "content": text}]}
        return (
            body | ({"prompt": text} if route == "/v1/completions" else said) | {"max_tokens": CAP}
        )


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("table"))
    yield made
    made.close()


# What `Messages` shows in place of a code.
KINDS = {
    "insufficient_quota": "billing_error",
    "invalid_api_key": "authentication_error",
    "upstream_busy": "rate_limit_error",
    "upstream_refused": "invalid_request_error",
    "internal_error": "api_error",
}
OF_EMBEDDINGS = ("400", "429", "500", "an error body with 200", "no choices", "garbage", "a reset")


def code_on(route: str, code: str, *, begun: bool) -> str:
    """Responses names few codes in a response that has failed."""
    ends = ("stop", "length", "", "insufficient_quota")
    if route == "/v1/responses" and begun and code not in ends:
        return "server_error"
    if route != "/v1/messages" or code in ("stop", "length", ""):
        return code
    return KINDS.get(code, "overloaded_error")


def check(rig: Rig, name: str, route: str, *, stream: bool) -> None:
    row = ROWS[name]
    wanted = row.stream if stream else row.whole
    client, events = rig.ask(row, route, stream=stream)
    if wanted.reason == "insufficient_quota" and row.tokens < 10:
        assert not events, "what is refused at admission is no usage"
    else:
        (event,) = events
        billed = (event.output_tokens, event.finish_reason)
        assert billed == (wanted.output, wanted.reason), event
        assert event.input_tokens == wanted.input or (wanted.input is None and event.input_tokens)
        if wanted.waived is not None:
            assert event.waived_tokens == wanted.waived, event
        if wanted.code not in ("stop", "length") and not wanted.words:
            assert event.quantity == (1 if wanted.reason == "client_closed" else 0), event
    assert client.status == wanted.status
    assert code_of(client) == code_on(route, wanted.code, begun=client.streamed), client.read
    assert client.words == wanted.words, client.read
    if stream and client.status == 200 and wanted.code:
        assert client.last, "the stream is ended"
    rig.loop.run_until_complete(limits_agree(rig))


async def limits_agree(rig: Rig) -> None:
    gateway = rig.gateway
    assert await gateway.kept() == expected(gateway.events(), gateway.refused)
    assert await gateway.held() == (0, 0)
    assert not gateway.services.spool.file.open_requests()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", TEXT)
@pytest.mark.parametrize("name", ROWS)
def test_an_ending(rig: Rig, name: str, route: str, stream: bool) -> None:
    check(rig, name, route, stream=stream)


@pytest.mark.parametrize("name", OF_EMBEDDINGS)
def test_an_ending_of_embeddings(rig: Rig, name: str) -> None:
    check(rig, name, EMBEDDINGS, stream=False)


def test_the_audit_is_clean_after_every_ending(rig: Rig) -> None:
    for name in ROWS:
        for route in TEXT:
            rig.ask(ROWS[name], route, stream=True)
    gateway = rig.gateway
    events = {each.request_id: each for each in gateway.events()}
    gateway.services.shipper.start()
    gateway.services.shipper.stop()
    rate_all(gateway.database, gateway.clock)
    with gateway.database.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report.differences
    assert report.steps["events"]["count"] == len(events)
    wasted = sum(each.waived_tokens for each in events.values())
    billed = sum(each.output_tokens for each in events.values())
    assert report.steps["receipts"]["generated_tokens"] == billed + wasted
