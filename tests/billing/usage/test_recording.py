"""Usage at the borders of what is stored, cut or parked, and what becomes of each parked event."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.usage import usage
from billing.usage.tables import ParkedEvent, UsageBatch, UsageEventRow, UsageRetention
from core.events import EngineCount, UsageKind
from core.ids import REQUEST, floor_id
from tests.billing.conftest import START, Deployment

INSTANT = timedelta(microseconds=1)
CUT_AT = {
    "finish_reason": 40,
    "engine_id": 80,
    "end_user": 256,
    "client_request_id": 200,
    "moderation": 20,
    "prompt_order": 40,
    "truncated": 40,
    "routed": 120,
}
REFUSED_ABOVE = {"project_id": 40, "key_id": 40, "model": 120, "adapter": 120, "route": 80}


def reasons(session: Session) -> dict[str, tuple[str, str]]:
    return {row.request_id: (row.code, row.reason) for row in usage.parked(session)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"occurred_at": START + timedelta(minutes=5)}, None),
        (
            {"occurred_at": START + timedelta(minutes=5) + INSTANT},
            ("future", "occurred_at 2026-01-01 00:05:00 UTC is in the future"),
        ),
        ({"quantity": 0}, None),
        ({"quantity": -1}, ("invalid", "quantity is -1; it must be 0 to 1000000000000000")),
        ({"kind": UsageKind.SPEECH, "units": 7}, None),
        ({"units": 7}, ("invalid", "generation has no units, but 7 are given")),
        ({"price_version": "gone"}, ("unknown_price", "there is no price version 'gone'")),
        ({"tenant_id": "euro"}, ("currency", "its price is in USD, the account in EUR")),
        *(({name: "x" * most}, None) for name, most in REFUSED_ABOVE.items()),
        *(
            ({name: "x" * (most + 1)}, ("invalid", f"{name} is longer than {most} characters"))
            for name, most in REFUSED_ABOVE.items()
        ),
    ],
)
def test_an_event_is_stored_up_to_its_borders_and_parked_beyond(
    lite: Deployment, session: Session, changes: dict[str, Any], reason: tuple[str, str] | None
) -> None:
    lite.tenant("euro", currency="EUR")
    event = lite.event(**changes)
    assert usage.record(session, [event], lite.clock) == 1
    assert usage.record(session, [event], lite.clock) == 0
    assert reasons(session) == ({} if reason is None else {event.request_id: reason})
    stored = session.scalars(select(UsageEventRow.request_id)).all()
    assert stored == ([event.request_id] if reason is None else [])
    assert [each.events for each in session.scalars(select(UsageBatch))] == [1] * len(stored)


def test_descriptions_are_cut_to_their_columns_and_whole_ones_kept(
    lite: Deployment, session: Session
) -> None:
    long = lite.event(**{name: "x" * (most + 1) for name, most in CUT_AT.items()})
    fits = lite.event(**{name: "y" * most for name, most in CUT_AT.items()})
    assert usage.record(session, [long, fits], lite.clock) == 2
    for event, letter in ((long, "x"), (fits, "y")):
        row = session.get_one(UsageEventRow, event.request_id)
        found = {name: getattr(row, name) for name in CUT_AT}
        assert found == {name: letter * most for name, most in CUT_AT.items()}


def test_usage_of_a_dropped_month_is_parked_if_its_id_tells_its_time(
    lite: Deployment, session: Session
) -> None:
    floor = floor_id(REQUEST, START)
    fields = {"kept_from": START, "events": 0, "dropped_at": START}
    session.add(UsageRetention(floor_id=floor, **fields))
    session.add(UsageRetention(floor_id=floor_id(REQUEST, START - timedelta(days=9)), **fields))
    session.flush()
    old = lite.event(request_id=floor_id(REQUEST, START - timedelta(seconds=1)))
    first, other = lite.event(request_id=floor), lite.event(request_id="a0")
    assert usage.record(session, [old, first, other], lite.clock) == 3
    why = "events of its month were dropped, so it may be a duplicate"
    assert reasons(session) == {old.request_id: ("too_old", why)}


def test_nothing_to_record_makes_no_batch(lite: Deployment, session: Session) -> None:
    assert usage.record(session, [], lite.clock) == 0
    assert usage.record_raw(session, [], lite.clock) == 0
    event = lite.event()
    assert usage.record(session, [event, lite.event(tenant_id="beta")], lite.clock) == 2
    assert session.get(BillingAccount, "beta") is not None, "its first usage creates the account"
    batches = session.scalars(select(UsageBatch.id)).all()
    assert usage.record(session, [event], lite.clock) == 0
    assert session.scalars(select(UsageBatch.id)).all() == batches, "an empty one is taken back"


def test_what_the_database_refuses_is_parked_in_a_form_that_it_takes(
    lite: Deployment, session: Session
) -> None:
    event = lite.event(
        request_id="r\0" + "x" * 50, tenant_id="t\0" + "y" * 50, model="a\0b", streamed=True
    )
    assert usage.park_refused(session, [event], "no\0t stored", lite.clock) == 1
    assert usage.park_refused(session, [event], "again", lite.clock) == 0
    (row,) = usage.parked(session)
    assert (row.request_id, row.tenant_id) == ("r" + "x" * 38, "t" + "y" * 38)
    assert (row.code, row.reason, row.parked_at) == ("refused", "not stored", START)
    assert row.payload["model"] == "ab"
    assert (row.payload["streamed"], row.payload["input_tokens"]) == (True, 100)
    assert row.payload["occurred_at"] == "2026-01-01T00:00:00+00:00"


def test_a_payload_that_is_no_event_is_parked_once_as_it_is(
    lite: Deployment, session: Session
) -> None:
    payloads: list[dict[str, Any]] = [
        {"request_id": "r" * 40, "tenant_id": "t" * 50},
        {"request_id": "r" * 41},
        {"request_id": ""},
    ]
    for payload in payloads * 2:
        usage.park_payload(session, payload, "un\0readable", lite.clock)
    rows = {row.request_id: row for row in session.scalars(select(ParkedEvent))}
    whole = rows.pop("r" * 40)
    assert (whole.tenant_id, whole.code, whole.reason) == ("t" * 40, "invalid", "unreadable")
    assert (whole.payload, whole.parked_at) == (payloads[0], START)
    assert sorted(len(name) for name in rows) == [len("invalid-") + 32] * 2
    assert {row.tenant_id for row in rows.values()} == {""}


def test_an_event_without_an_id_or_a_zone_is_none(lite: Deployment, session: Session) -> None:
    plain = usage._to_json(lite.event())
    payloads = [plain | {"request_id": ""}, plain | {"occurred_at": "2026-01-01T00:00:00"}]
    payloads.append(plain | {"request_id": "whole"})
    assert usage.record_raw(session, payloads, lite.clock) == 3
    found = sorted(reason for _, reason in reasons(session).values())
    assert found == [
        "not a usage event: occurred_at has no time zone",
        "not a usage event: request_id is empty",
    ]
    assert session.scalars(select(UsageEventRow.request_id)).all() == ["whole"]


def test_parked_events_are_listed_oldest_first_until_they_are_released_or_dismissed(
    lite: Deployment, session: Session
) -> None:
    events = [lite.event(occurred_at=START + timedelta(hours=hour)) for hour in (3, 2, 1)]
    for event in events:
        lite.clock.advance(1)
        usage.record(session, [event], lite.clock)
    asked = [event.request_id for event in events]
    assert [row.request_id for row in usage.parked(session)] == asked
    usage.dismiss(session, asked[1], "ann")
    lite.clock.set(START + timedelta(hours=1))
    assert usage.release(session, lite.clock) == 1
    session.expire_all()
    assert [row.request_id for row in usage.parked(session)] == asked[:1]
    rows = [session.get_one(ParkedEvent, each) for each in asked]
    assert [(row.dismissed_by, row.released_at) for row in rows] == [
        (None, None),
        ("ann", None),
        (None, START + timedelta(hours=1)),
    ]


def test_only_an_event_of_the_wrong_currency_gets_another_price(
    lite: Deployment, session: Session
) -> None:
    """The others keep the one that was pinned, and an account that is no more changes nothing."""
    lite.tenant("euro", currency="EUR")
    euros = lite.price({"input": "1"}, currency="EUR")
    priced = lite.event(tenant_id="euro")
    later = lite.event(occurred_at=START + timedelta(hours=1), price_version=lite.version.id)
    broken = {"request_id": "broken", "tenant_id": "acme"}
    usage.record(session, [priced, later], lite.clock)
    usage.park_payload(session, broken, "no event", lite.clock)
    assert {row.code for row in usage.parked(session)} == {"currency", "future", "invalid"}
    lite.clock.advance(hours=1)
    assert usage.release(session, lite.clock) == 2
    found = session.execute(select(UsageEventRow.request_id, UsageEventRow.price_version)).all()
    assert dict(found) == {priced.request_id: euros.id, later.request_id: lite.version.id}
    session.expire_all()
    assert [row.request_id for row in usage.parked(session)] == ["broken"]


def test_one_parked_event_that_is_stored_already_does_not_keep_the_others(
    lite: Deployment, session: Session
) -> None:
    hour = timedelta(hours=1)
    events = [lite.event(occurred_at=START + hour) for _ in range(2)]
    usage.record(session, events, lite.clock)
    lite.clock.advance(hours=1)
    assert usage.record(session, events[:1], lite.clock) == 1
    assert usage.release(session, lite.clock) == 1
    session.expire_all()
    assert usage.parked(session) == []
    assert sorted(session.scalars(select(UsageBatch.events))) == [1, 1]


def test_receipts_are_stored_once_and_read_in_order(lite: Deployment, session: Session) -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    counts = [EngineCount(f"req_{n}", "engine", 10 + n, n, 5, at, 9) for n in (2, 1, 3)]
    assert usage.store_receipts(session, counts) == 3
    assert usage.store_receipts(session, counts[:1]) == 0
    found = usage.receipts_of(session, ["req_2", "req_1"])
    assert [(row.request_id, row.prompt_tokens, row.busy_us) for row in found] == [
        ("req_1", 11, 9),
        ("req_2", 12, 9),
    ]
    assert (found[0].received_at, found[0].generated_tokens) == (at, 5)
