"""Second opinions over HTTP: a guard on an engine, on an upstream, or a remote API; and failures."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from sqlalchemy import select

from core.clock import SystemClock
from core.errors import SettingError
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.upstreams import Upstream
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.engines.openai import OpenAIEngine
from gateway.metering.engine_receipts import GUARD_NAMESPACE
from gateway.request.engine import Generation, Job
from gateway.screening.second_opinions import read_guards
from moderation.models import Decision
from tests.gateway.deployment import MODEL, Deployment, running_deployment

GREY = {"categories": {"violence": {"annotate": 0.01, "block": 0.9}}}
QUESTION = "How do I sharpen a kitchen knife?"


class AnsweringEngine(FakeEngine):
    """Says the same sentence to whatever it is asked."""

    def __init__(self, says: str) -> None:
        self._codec = load_codec(MODEL_DIR)
        super().__init__(vocab_size=self._codec.vocab_size, engine_id="guard")
        self.says = says

    async def generate(self, job: Job) -> Generation:
        self.asked = self._codec.decode(job.engine_request.prompt)
        ids = self._codec.encode(self.says)
        sampling = type(job.engine_request.sampling)(max_tokens=len(ids))
        request = type(job.engine_request)(
            job.engine_request.request_id,
            job.engine_request.namespace,
            ids,
            sampling,
            deadline_s=5.0,
        )
        return await super().generate(Job(request, job.request))


@pytest.fixture
def guard() -> AnsweringEngine:
    return AnsweringEngine("safe")


@pytest.fixture
def upstream() -> Iterator["Server"]:
    server = Server()
    yield server
    server.stop()


class Server:
    """An HTTP server in a thread: a moderation API and a completions API in one."""

    def __init__(self) -> None:
        self.scores: dict[str, float] = {}
        self.says = "safe"
        self.delay_s = 0.0
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self._loop = asyncio.new_event_loop()
        self.url = ""
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def _serve(self, ready: threading.Event) -> None:
        app = web.Application()
        app.router.add_post("/v1/moderations", self._moderate)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _moderate(self, request: web.Request) -> web.Response:
        await self._heard(request)
        return web.json_response(
            {"results": [{"category_scores": self.scores}]}, status=self.status
        )

    async def _complete(self, request: web.Request) -> web.Response:
        await self._heard(request)
        choice = {"index": 0, "text": self.says, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": 2}})

    async def _heard(self, request: web.Request) -> None:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization", ""))
        await asyncio.sleep(self.delay_s)


def policy(guard: str, *, on_error: str = "closed", deadline_ms: int = 3_000) -> dict[str, Any]:
    stage = {"guard": guard, "low": 0.0, "high": 1.0, "deadline_ms": deadline_ms}
    return {"input": GREY, "second_stage": stage, "on_error": {"guard": on_error}}


def put(deployment: Deployment, document: dict[str, Any]) -> None:
    url = f"{deployment.url}/admin/v1/policies"
    answer = httpx.put(url, json=document, headers=deployment.headers, timeout=60)
    assert answer.status_code == 200, answer.text


def ask(deployment: Deployment, text: str = QUESTION, *, stream: bool = False) -> httpx.Response:
    said = [{"role": "user", "content": text}]
    body = {"model": MODEL, "max_tokens": 4, "messages": said, "stream": stream}
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=30)


def decision(deployment: Deployment, answer: httpx.Response) -> Decision:
    wanted = answer.headers["x-request-id"]
    for _ in range(500):
        with deployment.services.database.read() as session:
            found = session.scalars(
                select(Decision).where(Decision.request_id == wanted, Decision.direction == "input")
            ).first()
            if found is not None:
                return found
        threading.Event().wait(0.02)
    raise AssertionError(f"no decision of {wanted}")


def with_guard(
    tmp_path: Path, places: list[dict[str, str]], client: Any = None, codec: Any = None
) -> Any:
    plain = load_codec(MODEL_DIR)
    engine = FakeEngine(vocab_size=plain.vocab_size, context_length=512)
    clients: dict[str, list[Any]] = {MODEL: [engine]}
    models = [ServedModel(MODEL, plain, 512, 0)]
    if client is not None:
        clients["guard-model"] = [client]
        models.append(ServedModel("guard-model", codec, 8_192, 0))
    settings = {"guards": json.dumps(places)}
    return running_deployment(tmp_path, engines=Engines(clients, models), settings=settings)


OWN = [{"guard": "llama-guard", "model": "guard-model"}]


def test_a_guard_on_our_engine_decides_in_the_grey_band(
    tmp_path: Path, guard: AnsweringEngine
) -> None:
    with with_guard(tmp_path, OWN, guard, load_codec(MODEL_DIR)) as deployment:
        put(deployment, policy("llama-guard"))
        cleared = ask(deployment)
        assert cleared.status_code == 200
        assert "x-tollhouse-moderation" not in cleared.headers
        assert QUESTION in guard.asked and "BEGIN CONVERSATION" in guard.asked
        assert decision(deployment, cleared).action == "allow"
        guard.says = "unsafe\nS1"
        stopped = ask(deployment)
        assert stopped.json()["error"]["code"] == "content_filter"
        found = decision(deployment, stopped)
        assert (found.action, found.categories) == ("block", ["violence"])
        assert {each.namespace for each in guard.submitted} == {GUARD_NAMESPACE}
        # The guard's own work is nobody's bill: two requests, two events.
        assert len(deployment.events(2)) == 2


def test_a_guard_on_an_upstream_that_speaks_text(tmp_path: Path, upstream: Server) -> None:
    client = OpenAIEngine(Upstream(upstream.url, name="guard"), "llama-guard-3")
    with with_guard(tmp_path, OWN, client) as deployment:
        put(deployment, policy("llama-guard"))
        upstream.says = "unsafe\nS1"
        assert ask(deployment).status_code == 400
        assert upstream.bodies[0]["model"] == "llama-guard-3"
        assert QUESTION in upstream.bodies[0]["prompt"]
        assert upstream.bodies[0]["temperature"] == 0.0


def remote(upstream: Server) -> list[dict[str, str]]:
    return [{"guard": "remote", "url": upstream.url, "api_key": "sk-x", "model": "omni"}]


def test_a_remote_moderation_api_is_asked_with_its_key(tmp_path: Path, upstream: Server) -> None:
    with with_guard(tmp_path, remote(upstream)) as deployment:
        put(deployment, policy("remote"))
        upstream.scores = {"violence": 0.0}
        assert ask(deployment).status_code == 200
        assert upstream.bodies == [{"model": "omni", "input": QUESTION}]
        assert upstream.keys == ["Bearer sk-x"]
        upstream.scores = {"violence": 0.95}
        assert ask(deployment).status_code == 400


def _late(server: Server) -> None:
    server.delay_s = 40.0


def _ill(server: Server) -> None:
    server.status = 500


def _mute(server: Server) -> None:
    server.scores = {}


@pytest.mark.parametrize("fault", [_late, _ill, _mute])
def test_a_guard_that_fails_refuses_or_marks_the_request(
    tmp_path: Path, upstream: Server, fault: Callable[[Server], None]
) -> None:
    with with_guard(tmp_path, remote(upstream)) as deployment:
        fault(upstream)
        put(deployment, policy("remote", deadline_ms=200))
        began = SystemClock().monotonic()
        closed = ask(deployment)
        assert SystemClock().monotonic() - began < 30
        assert closed.status_code == 400
        assert "guard_failed" in decision(deployment, closed).categories
        put(deployment, policy("remote", on_error="open", deadline_ms=200))
        opened = ask(deployment)
        assert opened.status_code == 200
        assert opened.headers["x-tollhouse-moderation"] == "unscanned"
        assert decision(deployment, opened).unscanned
        assert {each["moderation"] for each in deployment.events(2)} == {"block", "unscanned"}


def test_what_is_outside_the_band_asks_nobody(tmp_path: Path, upstream: Server) -> None:
    with with_guard(tmp_path, remote(upstream)) as deployment:
        document = policy("remote")
        document["second_stage"] |= {"low": 0.9, "high": 0.95}
        put(deployment, document)
        assert ask(deployment).status_code == 200
        assert upstream.bodies == []


def test_a_policy_with_a_guard_that_nobody_answers_for_is_refused(deployment: Deployment) -> None:
    url = f"{deployment.url}/admin/v1/policies"
    answer = httpx.put(url, json=policy("llama-guard"), headers=deployment.headers, timeout=60)
    assert answer.status_code == 400
    assert "TOLLHOUSE_GUARDS" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "text",
    [
        "llama-guard",
        '{"guard": "llama-guard"}',
        '[{"guard": "llama-guard"}]',
        '[{"guard": "oracle", "model": "m"}]',
        '[{"guard": "remote", "model": "m"}]',
        '[{"guard": "remote", "url": "ftp://x"}]',
        '[{"guard": "llama-guard", "model": 3}]',
        '[{"guard": "llama-guard", "modle": "m"}]',
        '[{"guard": "llama-guard", "model": "a"}, {"guard": "llama-guard", "model": "b"}]',
    ],
)
def test_wrong_guards_stop_the_start_and_name_the_setting(text: str) -> None:
    with pytest.raises(SettingError, match="TOLLHOUSE_GUARDS"):
        read_guards(text)


def answers_policy(
    *, on_error: str = "closed", deadline_ms: int = 3_000, **more: Any
) -> dict[str, Any]:
    """Prompts are not looked at; every answer is in the band."""
    stage = {
        "guard": "remote",
        "low": 0.0001,
        "high": 1.0,
        "deadline_ms": deadline_ms,
        "answers": True,
    }
    errors = {"guard": on_error}
    return {"roles": [], "output": GREY, "second_stage": stage, "on_error": errors, **more}


def words_of(answer: httpx.Response) -> tuple[str, str | None]:
    """Text and finish reason, streamed or not."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] or "", choice["finish_reason"]
    text, reason = "", None
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_the_grey_band_is_held_until_it_is_judged(
    tmp_path: Path, upstream: Server, stream: bool
) -> None:
    upstream.scores = {"violence": 0.0}
    with with_guard(tmp_path, remote(upstream)) as deployment:
        put(deployment, answers_policy())
        plain = ask(deployment, stream=stream)
        text, reason = words_of(plain)
        assert text and reason == "length"
        assert [body["input"] for body in upstream.bodies] == [text]
        upstream.scores = {"violence": 0.95}
        assert words_of(ask(deployment, stream=stream)) == ("", "content_filter")
        upstream.delay_s, upstream.scores = 1.0, {"violence": 0.0}
        put(deployment, answers_policy(deadline_ms=50))
        assert words_of(ask(deployment, stream=stream)) == ("", "content_filter"), "late: closed"
        put(deployment, answers_policy(on_error="open", deadline_ms=50))
        assert words_of(ask(deployment, stream=stream)) == (text, "length"), "late: open"
        events = sorted(deployment.events(4), key=lambda event: event["request_id"])
        assert [event["output_tokens"] for event in events] == [4, 0, 0, 4]
        assert [event["waived_tokens"] for event in events] == [0, 4, 4, 0]
        assert [event["paid_by"] for event in events] == [None, "tenant", "operator", None]
        assert events[3]["moderation"] == "unscanned"


def test_a_policy_that_only_notes_holds_no_answer(tmp_path: Path, upstream: Server) -> None:
    upstream.scores = {"violence": 0.95}
    with with_guard(tmp_path, remote(upstream)) as deployment:
        for more in ({"shadow": True}, {"mode": "async"}):
            put(deployment, answers_policy(**more))
            assert words_of(ask(deployment))[1] == "length"
        assert not upstream.bodies
