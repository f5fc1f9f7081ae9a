"""Issue 14, part 15: behind a proxy the client's address decides, and only trusted hops are believed.

Wrong keys lock out nobody who has a valid one, and a change of one tenant leaves the others' cached
keys alone.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from core.clock import SystemClock
from core.database import Database
from core.ids import new_id
from core.tenants import keys, secrets
from core.tenants.key_cache import KeyCache
from core.tenants.organisations import create_project, create_tenant
from core.tenants.scope import scope_of_operator
from gateway.edge.client_address import TrustedProxies
from tests.gateway.deployment import MODEL, Deployment, running_deployment

CLOCK = SystemClock()
CLIENT = "203.0.113.7"
PATHS = ["/v1/chat/completions", "/v1/models"]  # the direct path, and ASGI


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"trusted_proxies": "127.0.0.0/8,10.0.0.0/8"}
    with running_deployment(tmp_path_factory.mktemp("behind"), settings=settings) as made:
        yield made


def new_key(database: Database, name: str, *allowed: str) -> tuple[str, str]:
    """(tenant, key)"""
    with database.transaction() as session:
        tenant = create_tenant(session, CLOCK, name=new_id(name).replace("_", "-"))
        scope = scope_of_operator(tenant.id)
        project = create_project(session, scope, CLOCK, name="default").id
        issued = keys.issue(
            session, scope, CLOCK, project_id=project, name="k", allowed_ips=tuple(allowed)
        )
        return tenant.id, issued.secret


def call(deployment: Deployment, key: str, path: str, forwarded: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    if forwarded:
        headers["x-forwarded-for"] = forwarded
    if path == "/v1/models":
        return httpx.get(deployment.url + path, headers=headers, timeout=60)
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 1}
    body["messages"] = [{"role": "user", "content": "hello"}]
    return httpx.post(deployment.url + path, headers=headers, json=body, timeout=60)


@pytest.mark.parametrize("path", PATHS)
def test_a_keys_addresses_are_those_of_clients(behind: Deployment, path: str) -> None:
    _, key = new_key(behind.services.database, "listed", CLIENT)
    assert call(behind, key, path, CLIENT).status_code == 200
    assert call(behind, key, path, f"198.51.100.1, {CLIENT}, 10.2.3.4").status_code == 200
    for claimed in (f"{CLIENT}, 198.51.100.1", "198.51.100.1", "nonsense", ""):
        assert call(behind, key, path, claimed).status_code == 403, claimed


@pytest.mark.parametrize("path", PATHS)
def test_without_the_setting_nothing_is_believed(deployment: Deployment, path: str) -> None:
    _, key = new_key(deployment.services.database, "listed", CLIENT)
    assert call(deployment, key, path, CLIENT).status_code == 403


def test_without_the_setting_nobody_claims_to_use_tls(deployment: Deployment) -> None:
    answer = httpx.post(
        f"{deployment.url}/dashboard/sign-in",
        data={"secret": deployment.key},
        headers={"x-forwarded-proto": "https"},
        timeout=60,
    )
    assert answer.status_code == 303 and "secure" not in answer.headers["set-cookie"].lower()
    assert "strict-transport-security" not in answer.headers


def test_wrong_keys_lock_out_nobody_with_a_valid_one(deployment: Deployment) -> None:
    _, first_use = new_key(deployment.services.database, "new")
    got = [call(deployment, secrets.generate(), "/v1/models").status_code for _ in range(40)]
    assert set(got) == {401, 429}
    assert call(deployment, first_use, "/v1/models").status_code == 200


def test_a_change_of_one_tenant_leaves_the_others_keys_cached(deployment: Deployment) -> None:
    database = deployment.services.database
    (_, mine), (other, _) = new_key(database, "mine"), new_key(database, "other")
    cache = KeyCache(database, CLOCK)
    cache.poll()
    principal = cache.find(mine)
    with database.transaction() as session:
        scope = scope_of_operator(other)
        create_project(session, scope, CLOCK, name="second")
    cache.poll()
    assert cache.cached(mine) is principal
    with database.transaction() as session:
        keys.revoke(session, scope_of_operator(principal.tenant_id), CLOCK, principal.key_id)
    cache.poll()
    assert cache.cached(mine) is None


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.1", "1.2.3.4, 203.0.113.7, 10.9.9.9", "203.0.113.7"),
        ("10.0.0.1", "10.0.0.3, 10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.7:4711", "203.0.113.7"),
        ("10.0.0.1", "[2001:db8::1]:4711", "2001:db8::1"),
        ("10.0.0.1", "unknown", "10.0.0.1"),
        ("::ffff:10.0.0.1", "203.0.113.7", "203.0.113.7"),
        ("198.51.100.1", "203.0.113.7", "198.51.100.1"),
    ],
)
def test_the_last_hop_that_is_no_proxy_is_the_client(
    peer: str, forwarded: str, client: str
) -> None:
    headers = [(b"x-forwarded-for", forwarded.encode())]
    assert TrustedProxies(["10.0.0.0/8"]).client_of(peer, headers) == client


@pytest.mark.parametrize("said", ["https", "http", "", "http, https", "https, http", "gopher"])
def test_a_session_stays_on_tls_where_a_proxy_says_that_the_browser_uses_it(
    behind: Deployment, said: str
) -> None:
    """The last word is that of the trusted proxy; what stands before it is the client's own claim."""
    headers = {"x-forwarded-for": CLIENT} | ({"x-forwarded-proto": said} if said else {})
    answer = httpx.post(
        f"{behind.url}/dashboard/sign-in", data={"secret": behind.key}, headers=headers, timeout=60
    )
    assert answer.status_code == 303
    tls = said in ("https", "http, https")
    assert ("secure" in answer.headers["set-cookie"].lower()) is tls
    assert ("strict-transport-security" in answer.headers) is tls
