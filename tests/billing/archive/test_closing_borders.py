"""When a day may be closed, what its digest covers, and which part of an audit reads it again."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from billing.archive import frozen_sums
from billing.archive.tables import ClosedCharges
from billing.audit import reconcile
from billing.closing import closing
from billing.differences import Difference, Since
from billing.usage.tables import ClosedDay, ParkedEvent, UsageBatch, UsageRetention
from core.ids import REQUEST, floor_id
from tests.billing.archive.test_closed_days import unguarded
from tests.billing.audit.test_audit_faults import grant, record
from tests.billing.conftest import Deployment

DAY, INSTANT = timedelta(days=1), timedelta(microseconds=1)
AMOUNT = 43_500_000  # of an event
FIRST = datetime(2026, 1, 1, 13, 45, 10, 500_000, tzinfo=UTC)
MIDNIGHT = datetime(2026, 1, 1, tzinfo=UTC)


def used(made: Deployment, at: datetime, **fields: Any) -> int:
    """The batch of an event that is recorded at this time, and rated."""
    made.clock.set(at)
    record(made, [made.event(**fields)])
    made.rate()
    with made.database.read() as session:
        return session.scalars(select(UsageBatch.id).order_by(UsageBatch.id.desc())).first() or 0


def days(made: Deployment, now: datetime) -> list[tuple[datetime, int]]:
    with made.database.read() as session:
        return closing.whole_days(session, now)


def close(made: Deployment, at: datetime) -> list[datetime]:
    made.clock.set(at)
    return reconcile.close_days(made.database, made.clock)


def test_a_day_is_whole_an_hour_after_its_end(lite: Deployment) -> None:
    end = MIDNIGHT + DAY
    assert days(lite, end + 9 * DAY) == [], "nothing was ever used"
    used(lite, FIRST)
    last = used(lite, end - INSTANT)
    next_day = used(lite, end)
    assert days(lite, end + timedelta(hours=1) - INSTANT) == []
    assert days(lite, end + timedelta(hours=1)) == [(MIDNIGHT, last)]
    assert days(lite, end + DAY + timedelta(hours=1)) == [(MIDNIGHT, last), (end, next_day)]
    assert days(lite, end + 2 * DAY + timedelta(hours=1))[2:] == [(end + DAY, next_day)]
    assert close(lite, end + timedelta(hours=1)) == [MIDNIGHT]
    assert days(lite, end + DAY + timedelta(hours=1)) == [(end, next_day)]


def test_a_day_waits_for_its_own_unrated_and_parked_usage_alone(lite: Deployment) -> None:
    first, second = used(lite, FIRST), used(lite, FIRST + DAY)
    both = [(MIDNIGHT, first), (MIDNIGHT + DAY, second)]
    now = MIDNIGHT + 2 * DAY + timedelta(hours=1)
    with lite.database.transaction() as session:
        row = update(UsageBatch).where(UsageBatch.id == second)
        session.execute(row.values(rated_at=None))
        assert closing.whole_days(session, now) == both[:1]
        session.execute(row.values(rated_at=now))
        assert closing.whole_days(session, now) == both
        request_id = session.scalar(
            text("select request_id from usage_events where batch_id = :id").bindparams(id=second)
        )
        fields = {"tenant_id": "acme", "code": "currency", "reason": "", "payload": {}}
        waiting = ParkedEvent(request_id=request_id, parked_at=now, **fields)
        session.add(waiting)
        session.flush()
        assert closing.whole_days(session, now) == both[:1]
        for answer in ({"released_at": now}, {"released_at": None, "dismissed_by": "ann"}):
            for name, value in answer.items():
                setattr(waiting, name, value)
            session.flush()
            assert closing.whole_days(session, now) == both
        waiting.dismissed_by, waiting.request_id = None, "elsewhere"
        session.flush()
        assert closing.whole_days(session, now) == both


@pytest.fixture
def closed(lite: Deployment) -> Deployment:
    """January 1 with one event and a grant, closed; and one event of the 2nd."""
    with lite.database.transaction() as session:
        grant(session, lite)
    used(lite, FIRST)
    close(lite, MIDNIGHT + DAY + timedelta(hours=1))
    used(lite, FIRST + DAY)
    return lite


def test_a_closed_day_has_the_sums_of_its_rows(closed: Deployment) -> None:
    with closed.database.read() as session:
        (day,) = session.scalars(select(ClosedDay))
        sums = {
            "events": 1,
            "input_tokens": 100,
            "cached_tokens": 20,
            "output_tokens": 50,
            "waived_tokens": 3,
            "charges": 1,
            "units": 80 * 150_000 + 20 * 75_000 + 50 * 600_000,
        }
        assert day.sums == closing.row_sums(session, 0, day.last_batch) == sums
        assert closing.row_sums(session, day.last_batch, day.last_batch + 1) == sums
        assert closing.row_sums(session, 0, day.last_batch + 1)["events"] == 2
        assert closing.sums_of_closed_days(session) == {"count": 1} | sums
        assert (day.day, day.signature) == (MIDNIGHT, "")
        assert day.closed_at == MIDNIGHT + DAY + timedelta(hours=1)
        assert closing.open_usage(session) == Since(
            day.last_batch, floor_id(REQUEST, MIDNIGHT - DAY), 0, 0, MIDNIGHT + DAY
        )


def test_nothing_is_closed_before_the_first_closing(session: Session) -> None:
    assert closing.open_usage(session) == Since()
    assert closing.sums_of_closed_days(session) == {"count": 0}
    assert closing.latest(session) is None
    assert closing.row_sums(session, 0, 9) == dict.fromkeys(
        (
            *("events", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens"),
            *("charges", "units"),
        ),
        0,
    )


def tampered(made: Deployment, **changes: Any) -> list[Difference]:
    with made.database.transaction() as session:
        unguarded(session)
        (day,) = session.scalars(select(ClosedDay))
        for name, value in changes.items():
            before = getattr(day, name)
            setattr(day, name, before | value if isinstance(value, dict) else value)
        session.flush()
        session.expire_all()
        return closing.signed_days_are_unchanged(session, ("k" * 32,))


@pytest.mark.parametrize(
    "changes",
    [{"frozen": {"last_use": 7}}, {"frozen": {"seen_entry": 99}}, {"digest": "0" * 64}],
)
def test_the_digest_of_a_day_covers_what_was_frozen(
    closed: Deployment, changes: dict[str, Any]
) -> None:
    found = [each for each in tampered(closed, **changes) if "the frozen sums" in each.message]
    message = "the frozen sums of 2026-01-01 were changed"
    assert found == [Difference("closed days", "amount", message)]


def test_changed_sums_are_told_with_the_difference(closed: Deployment) -> None:
    with closed.database.read() as session:
        plain = closing.latest(session)
        assert plain is not None
        there, kept = plain.sums, plain.sums | {"units": plain.sums["units"] + 9}
    assert tampered(closed, sums={"units": kept["units"]}) == [
        Difference("closed days", "amount", "the frozen sums of 2026-01-01 were changed"),
        Difference(
            "closed days", "amount", f"2026-01-01 sums to {there}, was closed with {kept}", units=-9
        ),
    ]


def test_a_wrong_signature_is_told_only_with_a_key(closed: Deployment) -> None:
    ours = closing._key_id("k" * 32)
    assert len(ours) == 8
    assert [each.message for each in tampered(closed, signature=f"{ours}:00")] == [
        "the signature of 2026-01-01 is wrong"
    ]
    assert [each.message for each in tampered(closed, signature="ffffffff:00")] == [
        "2026-01-01 is signed with the key ffffffff, which TOLLHOUSE_CLOSING_KEYS lacks"
    ]
    with closed.database.read() as session:
        assert closing.signed_days_are_unchanged(session) == []


def test_the_rows_of_an_older_day_are_read_every_thirtieth(closed: Deployment) -> None:
    with closed.database.transaction() as session:
        unguarded(session)
        session.execute(update(ClosedCharges).values(amount=ClosedCharges.amount + 1))
        after = [*(n * DAY for n in (7, 8, 29, 30, 31, 60)), 7 * DAY + INSTANT]
        found = [closing.signed_days_are_unchanged(session, today=MIDNIGHT + n) for n in after]
    message = "the frozen groups of 2026-01-01 were changed"
    assert [[each.message for each in some] for some in found] == [
        *([message], [], [], [message], [], [message], [])
    ]


def test_entries_are_frozen_by_the_closing_an_hour_after_the_one_that_saw_them(
    closed: Deployment,
) -> None:
    """A transaction that was open then is committed by now: none runs for longer."""
    with closed.database.read() as session:
        first = closing.latest(session)
        assert first is not None
        rows = frozen_sums.read_charges(session, (first.last_batch, first.last_batch + 1))
        whole = frozen_sums.read_units(session, {}, {"last_entry": 6, "last_use": 1})
        assert sorted(units for _, _, units in whole) == [
            *(-(10**11) + AMOUNT, -AMOUNT),  # what is left of the grant, and revenue
            *(0, AMOUNT),  # the receivable that it paid, and its use
            10**11,
        ]
    seen = first.frozen["seen_entry"]
    assert (first.frozen["last_entry"], first.frozen["last_use"]) == (0, 0)
    assert (seen, first.frozen["seen_use"]) == (6, 1)
    for at, frozen in ((timedelta(hours=1) - INSTANT, (0, 0)), (timedelta(hours=1), (6, 1))):
        with closed.database.transaction() as session:
            day, now = MIDNIGHT + DAY, first.closed_at + at
            made = frozen_sums.freeze(session, day, rows, first, now)
            assert (made["last_entry"], made["last_use"]) == frozen
            assert (made["seen_entry"], made["seen_use"]) == (10, 2)
            stored = frozen_sums.stored_groups(session, day)
            assert stored.digest() == made["groups"]
            assert stored.charges == rows and len(rows) == 1
            kinds = {(kind, units) for kind, _, units in stored.units}
            assert (("grant", AMOUNT) in kinds) == (at == timedelta(hours=1))
            ids = [key for kind, key, _ in stored.units if kind == "grant"]
            assert frozen_sums.closed_units(session, "grant", ids) == dict.fromkeys(ids, AMOUNT)
            assert frozen_sums.closed_units(session, "account", ids) == {}
            session.rollback()


def test_values_are_asked_for_in_pieces_that_a_statement_may_have() -> None:
    names = [f"{number:05}" for number in range(10_001)]
    pieces = list(frozen_sums.chunks([*reversed(names), *names]))
    assert [len(each) for each in pieces] == [5_000, 5_000, 1]
    assert [name for each in pieces for name in each] == names
    assert list(frozen_sums.chunks([])) == []


def test_a_digest_leaves_out_later_columns_only_where_all_are_zero() -> None:
    """Days that older versions closed have rows without them, and the same digest."""
    units, parts = (0, 0, 0), (0,) * 9  # audio, images and characters; components of a division
    counts, amounts = tuple(range(1, 9)), tuple(range(20, 28))
    key = ("acme", "p", "p", "v", True)
    old = (*key, *counts, *units, *parts, *amounts, *units, *parts, 99)
    found = frozen_sums.Groups([old], [("account", "a", 5)]).digest()
    assert len(old) == 5 + 20 + 21
    assert frozen_sums._digested(old) == (*key, *counts, *amounts, 99)
    of_units, of_parts = [*range(13, 16), *range(33, 36)], [*range(16, 25), *range(36, 45)]
    for place in (*of_units, *of_parts):
        row = (*old[:place], 1, *old[place + 1 :])
        known = row if place in of_parts else (*row[:16], *row[25:36], 99)
        assert frozen_sums._digested(row) == known
        assert frozen_sums.Groups([row], [("account", "a", 5)]).digest() != found
    assert frozen_sums.Groups([old], [("account", "a", 6)]).digest() != found
    turned = frozen_sums.Groups([old, (*old[:-1], 98)], [])
    assert turned.digest() == frozen_sums.Groups([(*old[:-1], 98), old], []).digest()


def test_rows_that_retention_may_have_dropped_are_not_missed(closed: Deployment) -> None:
    """Those of the day of the cut, of days before it, and of a day with batches of fewer events."""

    def found(session: Session, **changes: Any) -> int:
        for retention in session.scalars(select(UsageRetention)):
            session.delete(retention)
        fields = {"floor_id": "x", "events": 0, "dropped_at": FIRST}
        session.add(UsageRetention(**(fields | changes)))
        session.flush()
        return len(closing.signed_days_are_unchanged(session))

    with closed.database.transaction() as session:
        unguarded(session)
        session.execute(text("update charges set amount = amount + 1"))
        assert found(session, kept_from=MIDNIGHT - DAY) == 2, "its sums and its groups"
        assert found(session, kept_from=MIDNIGHT - DAY + INSTANT) == 0
        session.execute(update(UsageBatch).values(events=0))
        assert found(session, kept_from=MIDNIGHT - DAY) == 0
        session.rollback()
