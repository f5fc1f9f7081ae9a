"""One row for each scarce resource of a gateway: a hostile tenant (or somebody without a key) holds as
much of it as it can get, and while it is held, everything that a victim does is answered.

A new resource is one more row of `HOLDS`.
"""

import asyncio
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated

import httpx
import pytest
from fastapi import Depends
from sqlalchemy import select

from billing.notices import outbox, webhooks
from core.tenants import keys, secrets
from core.tenants.models import Project
from core.tenants.scope import scope_of_operator
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.stored_data import archives
from gateway.edge.memory import bound_threads
from gateway.edge.threads import Work, current_tenant, run_as
from tests.dashboards.browser_client import browser, with_role
from tests.gateway.deployment import MODEL, Deployment, running_deployment
from tests.slow_server import SlowServer

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
MANY = 24  # more than any pool has


class Place:
    """A gateway with two tenants: the demo tenant is the victim."""

    def __init__(self, deployment: Deployment, issuer: SlowServer) -> None:
        self.deployment, self.issuer = deployment, issuer
        self.let_go = threading.Event()
        self.hostile = self.ask(
            "POST",
            "/admin/v1/tenants",
            deployment.services.operator_token,
            json={"name": "hostile"},
        ).json()["id"]
        self.hostile_key = with_role(deployment, "owner", self.hostile)
        self.page = browser(deployment, deployment.key)
        ctx = Annotated[AdminContext, Depends(RequirePermission("keys", "read"))]

        # Routes as any other, whose work ends when the test says so.
        def _hang(ctx: ctx) -> None:
            assert self.let_go.wait(60)

        def _hang_with_session(ctx: ctx) -> None:
            with ctx.database.read() as session:
                session.scalars(select(Project)).all()
                assert self.let_go.wait(60)

        deployment.app.add_api_route("/test/hang", _hang)
        deployment.app.add_api_route("/test/hang-with-session", _hang_with_session)

    def ask(self, method: str, path: str, key: str = "", **more: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key or self.deployment.key}"}
        headers.update(more.pop("headers", {}))  # type: ignore[call-overload]
        url = f"{self.deployment.url}{path}"
        return httpx.request(method, url, headers=headers, timeout=30, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    issuer = SlowServer(b"")
    settings = {"oidc_issuer": issuer.url, "oidc_client_id": "tollhouse"}
    try:
        with running_deployment(tmp_path_factory.mktemp("place"), settings=settings) as deployment:
            _in_loop(deployment, lambda: bound_threads(deployment.loop))
            yield Place(deployment, issuer)
    finally:
        issuer.close()


def _in_loop(deployment: Deployment, act: Callable[[], object]) -> None:
    done: Future[None] = Future()

    def _act() -> None:
        act()
        done.set_result(None)

    # As a task, because anyio's limit of threads is that of the current one's loop.
    async def _as_task() -> None:
        _act()

    asyncio.run_coroutine_threadsafe(_as_task(), deployment.loop).result(60)
    done.result(60)


# What the victim does meanwhile. Each returns whether it was answered as usual.


def _cached_key(place: Place) -> bool:
    return place.ask("POST", CHAT, json=BODY).status_code == 200


def _new_key(place: Place) -> bool:
    """One that is in no cache."""
    return place.ask("POST", CHAT, with_role(place.deployment, "developer"), json=BODY).is_success


def _unknown_key(place: Place) -> bool:
    return place.ask("GET", "/v1/models", secrets.generate()).status_code == 401


def _revoked_key(place: Place) -> bool:
    """Refused soon after another process revoked it: within a second, or more on a busy machine."""
    services, secret = place.deployment.services, with_role(place.deployment, "developer")
    assert place.ask("GET", "/v1/models", secret).is_success
    scope = scope_of_operator(place.deployment.tenant_id)
    with services.database.transaction() as session:
        keys.revoke(
            session, scope, services.clock, keys.find(session, secret, services.clock.now()).key_id
        )
    deadline = time.monotonic() + 20
    while place.ask("GET", "/v1/models", secret).status_code != 401:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _idempotent(place: Place) -> bool:
    headers = {"idempotency-key": uuid.uuid4().hex}
    answers = [place.ask("POST", CHAT, json=BODY, headers=headers) for _ in range(2)]
    return all(each.status_code == 200 for each in answers)


def _file(place: Place) -> bool:
    sent = {"data": {"purpose": "batch"}, "files": {"file": ("a.jsonl", b"{}")}}
    return place.ask("POST", "/v1/files", **sent).status_code == 200  # type: ignore[arg-type]


def _admin(place: Place) -> bool:
    return place.ask("GET", "/admin/v1/keys").status_code == 200


def _page(place: Place) -> bool:
    return place.page.get("/dashboard/keys").status_code == 200


def _large_prompt(place: Place) -> bool:
    """Encoded in a thread, and refused for its length."""
    body = {**BODY, "messages": [{"role": "user", "content": "word " * 20_000}]}
    return place.ask("POST", CHAT, json=body).status_code == 400


def _export(place: Place) -> bool:
    """Of all that is stored of it."""
    return place.ask("POST", "/admin/v1/tenant/export").status_code == 200


VICTIM = (
    _cached_key,
    _new_key,
    _unknown_key,
    _revoked_key,
    _idempotent,
    _file,
    _admin,
    _page,
    _large_prompt,
    _export,
)

Hold = Callable[[Place], AbstractContextManager[None]]


@dataclass(frozen=True)
class _Threads:
    """Work of the hostile tenant in the threads of a kind; None: those of requests."""

    kind: Work | None

    @contextmanager
    def __call__(self, place: Place) -> Iterator[None]:
        begun = threading.Semaphore(0)

        def _wait() -> None:
            begun.release()
            assert place.let_go.wait(60)

        async def _one() -> None:
            current_tenant.set(place.hostile)
            if self.kind is None:
                await asyncio.to_thread(_wait)
            else:
                await run_as(self.kind, _wait)

        work = [
            asyncio.run_coroutine_threadsafe(_one(), place.deployment.loop) for _ in range(MANY)
        ]
        try:
            assert begun.acquire(timeout=60)
            yield
        finally:
            place.let_go.set()
            for each in work:
                each.result(60)


@dataclass(frozen=True)
class _Calls:
    """Calls that hang in a route."""

    path: str

    @contextmanager
    def __call__(self, place: Place) -> Iterator[None]:
        calls = [
            threading.Thread(target=place.ask, args=("GET", self.path, place.hostile_key))
            for _ in range(MANY)
        ]
        for each in calls:
            each.start()
        try:
            time.sleep(0.5)  # until those that get a thread have it
            yield
        finally:
            place.let_go.set()
            for each in calls:
                each.join(60)


@contextmanager
def _sign_on(place: Place) -> Iterator[None]:
    """Without credentials: sign-ins begin while the issuer accepts connections and says nothing."""
    url = f"{place.deployment.url}/dashboard/sso/start"
    statuses: list[int] = []

    def _start() -> None:
        statuses.append(httpx.get(url, timeout=60).status_code)

    calls = [threading.Thread(target=_start) for _ in range(40)]
    for each in calls:
        each.start()
    assert place.issuer.asked.acquire(timeout=60)
    yield
    for each in calls:
        each.join(60)
    assert set(statuses) == {429, 503}, "an address may begin 30 a minute"
    assert not place.issuer.asked.acquire(blocking=False), "one caller asks for all"


@contextmanager
def _receivers(place: Place) -> Iterator[None]:
    """Receivers of webhooks that never end their answers."""
    services, server = place.deployment.services, SlowServer()
    scope = scope_of_operator(place.hostile)
    try:
        with services.database.transaction() as session:
            for number in range(6):
                url = f"{server.url}/{number}"
                made = webhooks.add(session, scope, services.clock, url)
                webhooks.test(session, scope, services.clock, made.id)
        sender = outbox.NetworkSender("", networks=("127.0.0.0/8",))
        run = threading.Thread(
            target=outbox.deliver, args=(services.database, services.clock, sender)
        )
        run.start()
        assert server.asked.acquire(timeout=60)
        yield
    finally:
        server.close()
        run.join(60)


@contextmanager
def _unread_streams(place: Place) -> Iterator[None]:
    """Streams with as many log-probabilities as there are, which nobody reads."""
    ask = {**BODY, "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": True}
    body = json.dumps(ask | {"logprobs": True, "top_logprobs": 20}).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {place.hostile_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    engine, port = place.deployment.engine, int(place.deployment.url.rpartition(":")[2])
    before, deadline = len(engine.submitted), time.monotonic() + 60
    with ExitStack() as lines:
        for _ in range(5):
            line = lines.enter_context(socket.create_connection(("127.0.0.1", port)))
            line.sendall(head.encode() + body)
        while len(engine.submitted) < before + 5:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield


@contextmanager
def _archives(place: Place) -> Iterator[None]:
    """Exports that nobody reads; how many and how long is bounded."""
    with ExitStack() as held:
        for _ in range(archives.MOST_ARCHIVES):
            held.enter_context(archives.Archive(place.hostile))
        refused = place.ask("POST", "/admin/v1/tenant/export", place.hostile_key)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "60"
        yield
    assert place.ask("POST", "/admin/v1/tenant/export", place.hostile_key).status_code == 200


HOLDS: dict[str, Hold] = {
    "threads of requests": _Threads(None),
    **{
        f"threads of {kind.label}": _Threads(kind)
        for kind in Work
        if kind not in (Work.OWN, Work.REVOCATION)
    },
    "threads of routes": _Calls("/test/hang"),
    "database connections": _Calls("/test/hang-with-session"),
    "sign-on without credentials": _sign_on,
    "outbox and write lock": _receivers,
    "event loop and sockets": _unread_streams,
    "temporary files": _archives,
}


@pytest.mark.parametrize("resource", HOLDS)
def test_a_victim_is_served_while_a_resource_is_held(place: Place, resource: str) -> None:
    place.let_go.clear()
    with HOLDS[resource](place):
        assert [each.__name__ for each in VICTIM if not _answered(each, place)] == []


def _answered(act: Callable[[Place], bool], place: Place) -> bool:
    try:
        return act(place)
    except httpx.TimeoutException:
        return False
