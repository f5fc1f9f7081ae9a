"""What is attached to a key by id follows it through rotation; no column of an id is forgotten."""

import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count

import pytest

from core.clock import SystemClock
from core.events import ModerationEvent
from core.tenants.attachments import ATTACHED
from core.tenants.scope import scope_of_operator
from migrations.tables import metadata
from moderation import strikes
from tests.gateway.admin.conftest import Town
from tests.gateway.deployment import MODEL

# Columns that say what happened, or whose row belongs to something else. By table; `*` is any table.
RECORDS = {
    "*": {
        "end_user_key",
        "safety_key",
        "created_by",
        "decided_by",
        "requested_by",
        "recorded_by",
        "signed_by",
        "changed_by",
    },
    "usage_*": {"project_id", "key_id", "member_id", "model", "adapter", "paid_by", "settled_by"},
    "service_*": {"project_id", "key_id", "member_id", "model", "adapter"},
    "engine_time_daily": {"model", "adapter"},
    "adjustments": {"project_id", "model"},
    "invoice_lines": {"project_id", "model", "adapter"},
    "price_versions": {"model", "adapter"},  # of the operator, by name
    "moderation_d*": {"project_id", "key_id"},
    "moderation_appeals": {"opened_by"},
    "moderation_suspensions": {"lifted_by"},
    # Work of a key ends with it; what is stored belongs to its project.
    "batches": {"project_id", "key_id", "model"},
    "files": {"project_id", "key_id"},
    "conversations": {"project_id", "key_id"},
    "stored_*": {"project_id", "key_id", "model"},
    "dashboard_sessions": {"key_id", "member_id"},  # a session is of the key that signed in
    "api_keys": {"origin_id"},  # is the chain itself
    "members": {"password_by", "invitation_by", "oidc_by"},
    "adapters": {"base_model"},
    "audit_log": {"target"},
    "money_acts": {"target"},
    "outbox": {"target"},
    "bank_lines": {"imported_by"},
    "child_invoices": {"billed_by"},
    "invoices": {"issued_by"},
    "parked_events": {"dismissed_by"},
    "reported_events": {"reported_by"},
    "rerates": {"posted_by"},
}
# Names without an id of a key, project, member, model or adapter.
_NEUTRAL = re.compile(
    r".*\.(adapter_(requests|amount|digest)|by_operator|counted_by|idempotency_key|lease_owner)"
    r"|closed_units\.key|engine_drains\.by|(limits|budgets)\.scope|sign_on_connections\.new_member_role"
)
_HINT = re.compile(
    r"(^|_)(key|project|member|adapter|model|target|scope|scopes|owner|holder|by)(_|$)"
)


def test_every_column_of_an_id_is_attached_or_a_record() -> None:
    attached = {each.column for each in ATTACHED}
    unknown = []
    for table in metadata.sorted_tables:
        records = {
            name
            for pattern, names in RECORDS.items()
            if re.fullmatch(pattern.replace("*", ".*"), table.name)
            for name in names
        }
        for column in table.columns:
            name = f"{table.name}.{column.name}"
            hinted = _HINT.search(column.name) and not _NEUTRAL.fullmatch(name)
            if hinted and column.name not in records and name not in attached:
                unknown.append(name)
    assert not unknown, f"attached to what, or records of what? {unknown}"
    tables = metadata.tables
    for each in attached:
        table, _, column = each.partition(".")
        assert column in tables[table].columns, each


Key = dict[str, str]
_names = count()


def _new_key(town: Town) -> Key:
    body = {"project_id": town.acme.project_id, "name": f"attached {next(_names)}"}
    made = town.call("POST", "/admin/v1/keys", town.acme.keys["owner"], json=body)
    assert made.status_code == 201, made.text
    return made.json()


def _rotated(town: Town, key: Key) -> Key:
    path = f"/admin/v1/keys/{key['id']}/rotate"
    made = town.call("POST", path, town.acme.keys["owner"], json={"overlap_s": 3600})
    assert made.status_code == 201, made.text
    return made.json()


def _ask(town: Town, key: Key, text: str = "hello") -> tuple[int, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    answer = town.call("POST", "/v1/chat/completions", key["secret"], json=body)
    return answer.status_code, answer.json().get("error", {}).get("code", "")


def _as_owner(town: Town, method: str, path: str, **options: object) -> None:
    answer = town.call(method, path, town.acme.keys["owner"], **options)
    assert answer.status_code < 300, answer.text


def _budget(town: Town, key: Key) -> None:
    body = {"scope": "key", "scope_id": key["id"], "cap": "0.000000000001", "hard": True}
    _as_owner(town, "POST", "/admin/v1/budgets", json=body)
    town.services.prices.refresh()


def _limit(town: Town, key: Key) -> None:
    body = {"scope": "key", "unit": "requests", "limit": 1, "period_s": 86_400, "target": key["id"]}
    _as_owner(town, "PUT", "/admin/v1/limits", json=body)
    _until(lambda: 429 in [_ask(town, key)[0] for _ in range(3)])


def _policy(town: Town, key: Key) -> None:
    params = {"level": "key", "target": key["id"]}
    document = {"input": {"deny": ["zeppelin"]}}
    _as_owner(town, "PUT", "/admin/v1/policies", params=params, json=document)


def _strike(town: Town, key: Key) -> None:
    """One of the two that suspend the key."""
    params = {"level": "key", "target": key["id"]}
    document = {"strikes": {"limit": 2, "window_hours": 1}}
    _as_owner(town, "PUT", "/admin/v1/policies", params=params, json=document)
    _blocked(town, key)


def _blocked(town: Town, key: Key) -> None:
    event = ModerationEvent(
        request_id=f"req_blocked_{next(_names)}",
        tenant_id=town.acme.id,
        project_id=town.acme.project_id,
        key_id=key["id"],
        at=datetime.now(UTC),
        direction="input",
        action="block",
        policy_version="v",
        text_sha256="0",
        categories=("violence",),
        scores={},
    )
    with town.services.database.transaction() as session:
        strikes.count_blocked(session, [event])


def _applied(town: Town) -> list[str]:
    with town.services.database.transaction() as session:
        return strikes.apply_rules(session, SystemClock(), scope_of_operator)


def _holds_strikes(town: Town, key: Key) -> None:
    _blocked(town, key)
    assert key["id"] in _applied(town), "one strike before the rotation, one after it"
    _until(lambda: _ask(town, key)[0] == 401)


def _suspended(town: Town, key: Key) -> None:
    """Suspended and freed again: its strikes no longer count."""
    _strike(town, key)
    _blocked(town, key)
    assert _applied(town) == [key["id"]]
    with town.services.database.transaction() as session:
        strikes.lift(session, scope_of_operator(town.acme.id), SystemClock(), key["id"])


def _free_of_old_strikes(town: Town, key: Key) -> None:
    assert _applied(town) == []
    _blocked(town, key)
    assert _applied(town) == [], "one strike since the suspension was lifted"


def _holds(text: str, status: int, code: str) -> Callable[[Town, Key], None]:
    def _check(town: Town, key: Key) -> None:
        deadline = time.monotonic() + 10
        while (got := _ask(town, key, text)) != (status, code):
            assert time.monotonic() < deadline, f"{got}, not {status} {code}"
            time.sleep(0.05)

    return _check


Scenario = tuple[Callable[[Town, Key], None], Callable[[Town, Key], None]]
SCENARIOS: dict[str, Scenario] = {
    "budgets.scope_id": (_budget, _holds("hello", 429, "insufficient_quota")),
    "limits.target": (_limit, _holds("hello", 429, "rate_limit_exceeded")),
    "moderation_policies.target": (_policy, _holds("a zeppelin", 400, "content_filter")),
    "moderation_strikes.key_id": (_strike, _holds_strikes),
    "moderation_suspensions.key_id": (_suspended, _free_of_old_strikes),
}
BY_ID = [
    each.column for each in ATTACHED if "key" in each.to and not each.column.startswith("api_keys.")
]


def _until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "what is attached to the key does not hold"
        time.sleep(0.05)


@pytest.fixture
def key(town: Town) -> Iterator[Key]:
    yield _new_key(town)


@pytest.mark.parametrize("column", BY_ID)
def test_what_is_attached_to_a_key_follows_it_through_rotations(
    town: Town, key: Key, column: str
) -> None:
    attach, holds = SCENARIOS[column]
    attach(town, key)
    holds(town, _rotated(town, _rotated(town, key)))


@pytest.mark.parametrize(
    "column", ["budgets.scope_id", "limits.target", "moderation_policies.target"]
)
@pytest.mark.parametrize("attached_to", [0, 1])
def test_the_id_of_any_key_of_a_chain_names_all_of_it(
    town: Town, key: Key, column: str, attached_to: int
) -> None:
    chain = [key, _rotated(town, key)]
    attach, holds = SCENARIOS[column]
    attach(town, chain[attached_to])
    for each in chain:
        holds(town, each)


def test_a_rotated_key_has_every_right_and_bound_of_the_old_one(town: Town, key: Key) -> None:
    own = {
        each.column.partition(".")[2] for each in ATTACHED if each.column.startswith("api_keys.")
    }
    body = {
        "project_id": town.acme.project_id,
        "name": "bounded",
        "role": "viewer",
        "scopes": {"models": [MODEL], "routes": ["/v1/*"]},
        "allowed_ips": ["127.0.0.1/32"],
        "expires_at": "2099-01-01T00:00:00+00:00",
        "routing": {"fallback": "off"},
    }
    made = town.call("POST", "/admin/v1/keys", town.acme.keys["owner"], json=body).json()
    rotated = _rotated(town, made)
    assert {name: made[name] for name in own} == {name: rotated[name] for name in own}
    fresh = {"id", "secret", "last_four", "created_at", "revoked_at", "last_used_at", "rotated_to"}
    assert made.keys() - own - fresh == {"origin_id"}
    assert rotated["origin_id"] == made["id"] != rotated["id"]
