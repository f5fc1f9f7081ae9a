"""One generation to one client: attempts, endings and what is told of them, without a server."""

import asyncio
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from core.errors import InsufficientQuota, TollhouseError, Unavailable
from engine.protocol import FinishReason
from gateway.answers import delivery as delivery_module
from gateway.answers.deadlines import Deadlines
from gateway.answers.delivery import KEEP_ALIVE, Delivery
from gateway.answers.surface import ResponseInfo
from gateway.engines.routing.fallbacks import TryFallback
from gateway.request.engine import Job, TextChunk
from gateway.request.inference import InferenceRequest

PLENTY = 1 << 60


def said(text: str, reason: str | None = None, count: int = 1) -> TextChunk:
    return TextChunk("req_1", 0, text, count, reason)


class Generated:
    """`steps`: lists of chunks, or an error, in order."""

    def __init__(self, *steps: list[TextChunk] | Exception) -> None:
        self.steps, self.cancelled = list(steps), 0
        self.receipt: Any = SimpleNamespace(finish_reason=FinishReason.STOP, message="")

    async def take(self, needed: int = 1) -> list[TextChunk]:
        await asyncio.sleep(0)
        step = self.steps.pop(0) if self.steps else []
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled += 1

    async def ended(self, _timeout_s: float) -> Any:
        return self.receipt


class Stream:
    def begin(self) -> bytes:
        return b"<"

    def delta(self, delta: Any) -> bytes:
        return str(delta.text).encode()

    def end(self, usage: Any, _choices: Any) -> bytes:
        return b">%d" % usage.output

    def failed(self, error: TollhouseError) -> bytes:
        return f"!{error.code}".encode()


class Surface:
    def stream(self, *_given: Any) -> Stream:
        return Stream()

    def answer(self, _info: Any, _request: Any, choices: Any, usage: Any) -> dict[str, Any]:
        return {"text": "".join(choices[0].text), "output": usage.output}


class Client:
    def __init__(self) -> None:
        self.writable = True  # it reads as fast as it gets
        self.started = self.disconnected = self.broken = False
        self.batch_line = self.batch_job = None
        self.status, self.sent, self.last = 0, list[bytes](), False
        self.body: Any = None
        self.leave: Any = None

    def on_disconnect(self, callback: Any) -> None:
        self.leave = callback

    async def start(self, status: int, _headers: Any) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes, *, more: bool = True) -> None:
        self.sent.append(data)
        self.last = not more

    def write_now(self, data: bytes) -> None:
        self.sent.append(data)

    async def answer(self, status: int, _headers: Any, body: bytes) -> None:
        self.started, self.status, self.body = True, status, orjson.loads(body)


class Meter:
    def __init__(self) -> None:
        self.opened = SimpleNamespace(engine_id="one")
        self.moderation = self.routed = None
        self.moves, self.closed, self.soon = list[str](), list[Any](), list[Any]()

    async def rerouted(self, name: str) -> None:
        self.moves.append(name)

    def first_token(self) -> None:
        return

    def begin_stream(self) -> None:
        return

    def draft(self, ending: Any, _receipt: Any) -> Any:
        return SimpleNamespace(
            request_id="req_1", input_tokens=7, cached_tokens=0, output_tokens=ending.delivered
        )

    async def close(
        self, ending: Any, receipt: Any, _statements: Any = None, *, draft: Any = None
    ) -> Any:
        self.closed.append(ending)
        return draft or self.draft(ending, receipt)

    def close_soon(self, ending: Any, _receipt: Any) -> None:
        self.soon.append(ending)


class Replica:
    def __init__(self, name: str, generated: Generated | Exception, has: bool = True) -> None:
        self.name, self._generated, self._has = name, generated, has
        self.client = SimpleNamespace(speaks_text=True, generate=self._generate)

    async def _generate(self, _job: Any) -> Any:
        if isinstance(self._generated, Exception):
            raise self._generated
        return self._generated

    def has(self, _digest: str) -> bool:
        return self._has


class Route:
    """The replicas in turn."""

    def __init__(self, *replicas: Replica, adapter: str | None = None) -> None:
        self.replicas = list(replicas)
        held = SimpleNamespace(digest=adapter) if adapter else None
        self.query = SimpleNamespace(target=SimpleNamespace(adapter=held))
        self.loaded, self.answers, self.loading_s = list[str](), 0, 0.0
        self.lefts = 0

    @property
    def replica(self) -> Replica:
        return self.replicas[0]

    async def load_adapter(self, replica: Replica) -> None:
        await asyncio.sleep(self.loading_s)
        self.loaded.append(replica.name)

    def next(self) -> Replica | None:
        return self.replicas[0] if self.replicas else None

    def failed(self, _error: TollhouseError) -> bool:
        if len(self.replicas) > 1:
            self.replicas.pop(0)
            return True
        return False

    def is_starting(self) -> bool:
        return False

    def why(self) -> str:
        return "first"

    def sent(self, _generation: Any) -> None:
        return

    def first_token(self) -> None:
        return

    def begin_stream(self) -> None:
        return

    def answered(self) -> None:
        self.answers += 1

    def left(self, _receipt: Any) -> None:
        self.lefts += 1


class Money:
    def __init__(self, covered: int = PLENTY, more: int = 0) -> None:
        self.covered, self._more, self.asked = covered, more, list[int]()

    async def extend(self, output_tokens: int) -> bool:
        self.asked.append(output_tokens)
        self.covered += self._more
        return self.covered >= output_tokens


class Case:
    def __init__(self, route: Route, *, stream: bool = False, **more: Any) -> None:
        self.client, self.meter, self.route = Client(), Meter(), route
        self.money = more.pop("money", Money())
        keep_alive_s = more.pop("keep_alive_s", 60.0)
        self.request = InferenceRequest("chat", "m", messages=[], stream=stream, **more)
        self.delivery = Delivery(
            Surface(),  # type: ignore[arg-type]
            self.client,  # type: ignore[arg-type]
            self.request,
            ResponseInfo("req_1", 0, "m", None, 7),
            guards=lambda: (),
            meter=self.meter,  # type: ignore[arg-type]
            reservation=self.money,
            headers=list,
            keep_alive_s=keep_alive_s,
            deadlines=Deadlines(),
        )

    async def run(self, *, final: bool = True) -> int:
        engine_request = SimpleNamespace(prompt=[1], deadline_s=None)
        job = Job(engine_request, self.request)  # type: ignore[arg-type]
        return await self.delivery.run(self.route, job, final=final)  # type: ignore[arg-type]

    @property
    def ending(self) -> tuple[str, int, int]:
        (found,) = self.meter.closed
        return found.finish_reason, found.status, found.delivered


def good(text: str = "abc") -> Generated:
    return Generated([said(text, "stop")])


LOST = Unavailable("lost", code="engine_unavailable")


async def test_a_whole_answer_is_charged_and_sent_once() -> None:
    generated = Generated([said("ab")], [said("c", "stop")])
    case = Case(Route(Replica("one", generated)))
    assert await case.run() == 200
    assert (case.client.status, case.client.body) == (200, {"text": "abc", "output": 3})
    assert case.ending == ("stop", 200, 3) and case.meter.moves == []
    assert generated.cancelled == 0, "an engine that has ended is not told to stop"
    assert case.route.answers == 1 and case.route.lefts == 1


async def test_a_stream_begins_once_and_ends_with_its_usage() -> None:
    generated = Generated([said("ab")], [said("c", "stop")])
    case = Case(Route(Replica("one", generated)), stream=True)
    assert await case.run() == 200
    assert case.client.sent == [b"<ab", b"c", b">3"] and case.client.last
    assert (case.client.status, case.ending) == (200, ("stop", 200, 3))


@pytest.mark.parametrize("early", [True, False])
async def test_another_replica_takes_over_and_only_its_work_counts(early: bool) -> None:
    """The first one fails at once, or after tokens that nobody was sent."""
    first = Generated([said("xxx", count=3)], LOST)
    lost = Replica("one", LOST if early else first)
    case = Case(Route(lost, Replica("two", good())), money=Money(covered=3))
    assert await case.run() == 200
    assert case.client.body == {"text": "abc", "output": 3} and case.ending == ("stop", 200, 3)
    assert case.meter.moves == ["two"] and case.money.asked == []
    assert first.cancelled == (0 if early else 1), "what it still does is stopped"


async def test_a_stream_that_has_begun_is_not_begun_again() -> None:
    route = Route(Replica("one", Generated([said("ab")], LOST)), Replica("two", good()))
    case = Case(route, stream=True)
    assert await case.run() == 503
    assert case.client.sent == [b"<ab", b"!engine_unavailable"] and case.client.last
    assert case.client.broken and case.ending == ("engine_unavailable", 503, 2)


async def test_a_failure_before_the_answer_is_raised_and_settled() -> None:
    case = Case(Route(Replica("one", LOST)))
    with pytest.raises(Unavailable):
        await case.run()
    assert case.ending == ("engine_unavailable", 503, 0) and not case.client.started


async def test_a_fallback_model_is_tried_with_the_meter_open() -> None:
    generated = Generated([said("ab")], LOST)
    case = Case(Route(Replica("one", generated)))
    with pytest.raises(TryFallback):
        await case.run(final=False)
    assert generated.cancelled == 1 and case.meter.closed == []
    streamed = Case(Route(Replica("one", Generated([said("ab")], LOST))), stream=True)
    assert await streamed.run(final=False) == 503, "a part of the answer was sent"


@pytest.mark.parametrize(
    ("reason", "code"),
    [(FinishReason.ERROR, "engine_failed"), (FinishReason.DEADLINE, "deadline_exceeded")],
)
async def test_an_engine_that_ends_without_an_answer_fails_the_request(
    reason: FinishReason, code: str
) -> None:
    case = Case(Route(Replica("one", Generated([said("", reason)]))))
    with pytest.raises(TollhouseError) as failed:
        await case.run()
    assert failed.value.code == code and case.ending[:2] == (code, int(failed.value.status))
    assert case.route.answers == 0, "that is no first token"


async def test_an_engine_whose_receipt_never_comes_is_told_to_stop() -> None:
    generated = good()
    generated.receipt = None
    assert await Case(Route(Replica("one", generated))).run() == 200
    assert generated.cancelled == 1


async def test_the_end_of_the_chunks_without_a_reason_is_a_failure() -> None:
    generated = Generated([said("ab")])
    generated.receipt = SimpleNamespace(finish_reason=FinishReason.ERROR, message="out of memory")
    case = Case(Route(Replica("one", generated)))
    with pytest.raises(Unavailable, match="early: out of memory"):
        await case.run()


async def test_money_that_is_exactly_enough_is_not_asked_for_again() -> None:
    chunks = [said("ab", count=2), said("c", "stop")]
    case = Case(Route(Replica("one", Generated(chunks))), money=Money(covered=3))
    assert await case.run() == 200 and case.money.asked == []


async def test_an_answer_ends_where_the_money_does_and_the_engine_is_stopped() -> None:
    generated = Generated([said("ab", count=2), said("cd", count=2)], [said("e", "stop")])
    case = Case(Route(Replica("one", generated)), money=Money(covered=3))
    with pytest.raises(InsufficientQuota, match="the rest of this answer"):
        await case.run()
    assert case.client.body is None and case.money.asked == [4]
    assert case.ending == ("insufficient_quota", 429, 0) and generated.cancelled == 1


async def test_an_adapter_is_loaded_where_the_replica_lacks_it() -> None:
    for has, loaded in ((True, []), (False, ["one"])):
        case = Case(Route(Replica("one", good(), has), adapter="sha"))
        assert await case.run() == 200 and case.route.loaded == loaded


async def test_a_stream_is_kept_alive_while_an_adapter_loads() -> None:
    route = Route(Replica("one", good(), has=False), adapter="sha")
    route.loading_s = 0.2
    case = Case(route, stream=True, keep_alive_s=0.02)
    assert await case.run() == 200
    assert case.client.sent[0] == KEEP_ALIVE and case.client.sent[-2:] == [b"<abc", b">3"]


async def test_a_client_that_left_while_an_adapter_loads_gets_nothing_generated() -> None:
    generated = good()
    case = Case(Route(Replica("one", generated, has=False), adapter="sha"))
    case.client.disconnected = True
    assert await case.run() == 499
    assert case.ending == ("client_closed", 499, 0) and len(generated.steps) == 1


async def test_a_client_that_leaves_stops_the_engine() -> None:
    class Leaving(Generated):
        async def take(self, needed: int = 1) -> list[TextChunk]:
            chunks = await super().take()
            if not self.steps:
                case.client.disconnected = True
                case.client.leave()
            return chunks

    generated = Leaving([said("ab")], [said("c", "stop")])
    case = Case(Route(Replica("one", generated)), stream=True)
    assert await case.run() == 499
    assert case.ending == ("client_closed", 499, 2) and generated.cancelled >= 1


@pytest.mark.parametrize(
    ("fault", "reason", "status"),
    [(RuntimeError("bug"), "gateway_fault", 500), (asyncio.CancelledError(), "shutdown", 503)],
)
async def test_a_fault_and_a_shutdown_close_the_meter_with_what_was_delivered(
    fault: BaseException, reason: str, status: int
) -> None:
    generated = Generated([said("ab")], fault)  # type: ignore[arg-type]
    if isinstance(fault, asyncio.CancelledError):

        async def _cancelled(_needed: int = 1) -> list[TextChunk]:
            if len(generated.steps) == 2:
                return await Generated.take(generated)
            raise fault

        generated.take = _cancelled  # type: ignore[method-assign]
    case = Case(Route(Replica("one", generated)), stream=True)
    with pytest.raises(type(fault)):
        await case.run()
    (ending,) = case.meter.soon or case.meter.closed
    assert (ending.finish_reason, ending.status, ending.delivered) == (reason, status, 2)
    assert generated.cancelled == 1
    if reason == "gateway_fault":
        assert case.client.sent[-1] == b"!internal_error" and case.client.last


@pytest.mark.parametrize(("size", "threads"), [(1_000, 0), (1_001, 1), (20_000, 2)])
async def test_large_work_leaves_the_loop_and_small_work_does_not(
    monkeypatch: pytest.MonkeyPatch, size: int, threads: int
) -> None:
    used = []

    async def _in_thread(work: Any) -> Any:
        used.append(work)
        return work()

    monkeypatch.setattr(delivery_module, "run_in_thread", _in_thread)
    case = Case(Route(Replica("one", good("x" * size))))
    assert await case.run() == 200
    assert len(used) == threads, "screening in portions, the whole answer by its size"


async def test_other_requests_have_their_turn_between_portions() -> None:
    turns, chunks = 0, [said("x" * 900) for _ in range(10)]

    async def _count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    case = Case(Route(Replica("one", Generated([*chunks, said("", "stop")]))), stream=True)
    other = asyncio.create_task(_count())
    assert await case.run() == 200
    other.cancel()
    assert len(case.client.sent) >= 10 and turns >= 10
