"""Sums of usage that is not rated yet, of the largest end users, and of an audit's report, by hand."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session

from billing.audit import reconcile
from billing.audit.reconcile import AuditReport
from billing.audit.tables import AuditRun
from billing.differences import Difference, duplicated, lost
from billing.pricing import prices
from billing.rating.unrated import UnratedUsage
from billing.usage import origin_rollups
from billing.usage.origin_rollups import OTHERS, Largest
from billing.usage.tables import (
    DailyEndUserUsage,
    DailyEngineUsage,
    ParkedEvent,
    UsageBatch,
    UsageRetention,
)
from core.tenants.scope import scope_of_key, scope_of_operator
from tests.billing.conftest import START, Deployment

DAY, HOUR = timedelta(days=1), timedelta(hours=1)
ACME = scope_of_operator("acme")
COLUMNS = ("requests", "input_tokens")


def _spent(lite: Deployment, unrated: UnratedUsage, *tenants: str, **asked: Any) -> int:
    with lite.database.read() as session:
        book = prices.load_price_book(session)
        unrated.refresh(session, frozenset(tenants or ("acme",)), book)
    scopes = asked.pop("scopes", {"tenant_id": "acme"})
    sets = {name: {value} for name, value in scopes.items()}
    return unrated.spent(sets, asked.pop("currency", "USD"), **asked)


def test_usage_that_waits_costs_what_it_will(lite: Deployment) -> None:
    lite.tenant("birch")
    unrated = UnratedUsage()
    assert _spent(lite, unrated) == 0
    lite.record(lite.event(), lite.event(tenant_id="birch", project_id="other"))
    # 80 at 0.15, 20 at 0.075 and 50 at 0.60 a million tokens.
    one = 43_500_000
    assert _spent(lite, unrated) == one
    assert _spent(lite, unrated, scopes={"tenant_id": "birch"}) == 0, "it was not asked for"
    assert _spent(lite, unrated, "acme", "birch", scopes={"tenant_id": "birch"}) == one
    assert _spent(lite, unrated, "acme", "birch", scopes={"tenant_id": "birch"}) == one
    assert _spent(lite, unrated, "acme", "birch", scopes={"project_id": "other"}) == one
    assert _spent(lite, unrated, scopes={"tenant_id": "acme", "key_id": "none"}) == 0
    assert _spent(lite, unrated, currency="EUR") == 0
    lite.clock.advance(hours=1)
    lite.record(lite.event(price_version="pv_none"), lite.event(status=500))
    # Tokens of a failure of ours cost what others do; what has no price is parked.
    assert _spent(lite, unrated) == 2 * one
    hours = {"start": START + HOUR, "end": START + 2 * HOUR}
    assert _spent(lite, unrated, **hours) == one
    assert _spent(lite, unrated, end=START + HOUR) == one
    assert _spent(lite, unrated, start=START, end=START) == 0
    lite.rate()
    assert _spent(lite, unrated) == 0


def test_a_request_fee_of_what_waits_is_not_owed_for_our_failures(lite: Deployment) -> None:
    version = lite.price({"request": "0.01"}, model="fee")
    plain = {"model": "fee", "price_version": version.id, "input_tokens": 0, "cached_tokens": 0}
    plain |= {"output_tokens": 0, "waived_tokens": 0}
    for status, owed in ((200, 1), (499, 2), (500, 2), (503, 2)):
        lite.record(lite.event(**plain, status=status))
        assert _spent(lite, UnratedUsage()) == owed * 10**10


def _row(session: Session, table: Any, name: str, at: datetime, **sums: int) -> None:
    row: dict[str, Any] = dict.fromkeys((each.name for each in table.__table__.columns), 0)
    row |= {"tenant_id": "acme", "project_id": "p", "at": at} | sums
    row["engine_id" if table is DailyEngineUsage else "end_user"] = name
    session.execute(table.__table__.insert().values(**row))


def _largest(session: Session, scope: Any = ACME, **asked: Any) -> Largest:
    given = {"most": 2, "drawn": 1, **asked}
    span = (START, START + 2 * DAY)
    return origin_rollups.largest_end_users(session, scope, span, COLUMNS, **given)


def test_the_largest_end_users_and_the_others(session: Session) -> None:
    for name, day, requests, tokens, fields in (
        ("ada", 0, 1, 50, {}),
        ("ada", 1, 2, 10, {}),
        ("bob", 0, 9, 40, {}),
        ("cyd", 1, 5, 40, {"project_id": "q"}),
        ("dan", 2, 99, 999, {}),
        ("eve", -1, 99, 999, {}),
        ("fay", 0, 99, 999, {"tenant_id": "birch"}),
    ):
        sums = {"requests": requests, "input_tokens": tokens, **fields}
        _row(session, DailyEndUserUsage, name, START + day * DAY, **sums)
    for day, requests, tokens, project in ((0, 10, 90, "p"), (1, 2, 10, "p"), (1, 5, 40, "q")):
        sums = {"requests": requests, "input_tokens": tokens, "project_id": project}
        _row(session, DailyEngineUsage, "e", START + day * DAY, **sums)  # type: ignore[arg-type]

    def _of(requests: int, tokens: int) -> dict[str, int]:
        return {"requests": requests, "input_tokens": tokens}

    by_day = {START: _of(10, 90), START + DAY: _of(7, 50)}
    assert _largest(session) == Largest(
        {"ada": _of(3, 60), "bob": _of(9, 40), OTHERS: _of(5, 40)},
        by_day,
        {"bob": {START: _of(9, 40)}},
    )
    whole = _largest(session, most=3, drawn=2)
    assert list(whole.by_name) == ["ada", "bob", "cyd"]
    assert whole.drawn == {"bob": {START: _of(9, 40)}, "cyd": {START + DAY: _of(5, 40)}}
    p_only = {START: _of(10, 90), START + DAY: _of(2, 10)}
    for found in (
        _largest(session, projects=("p",), drawn=0),
        _largest(session, scope_of_key("acme", "p", "k", "member"), projects=("q",), drawn=0),
    ):
        assert found == Largest({"ada": _of(3, 60), "bob": _of(9, 40)}, p_only, {})


def test_days_of_end_users_are_known_since_the_last_drop(session: Session) -> None:
    assert origin_rollups.known_since(session, START)
    row = {"floor_id": "req_a", "events": 1, "dropped_at": START}
    session.add(UsageRetention(kept_from=START + DAY, **row))
    session.flush()
    found = [origin_rollups.known_since(session, START + each * DAY) for each in range(3)]
    assert found == [False, True, True]
    for day in range(3):
        _row(session, DailyEndUserUsage, "ada", START + day * DAY, requests=1, input_tokens=1)
    origin_rollups.drop_names_before(session, START + DAY)
    left = session.scalars(select(DailyEndUserUsage.at).order_by(DailyEndUserUsage.at))
    assert list(left) == [START + DAY, START + 2 * DAY]


def test_the_report_of_an_audit() -> None:
    ids = [f"req_{n}" for n in range(21)]
    found = (*lost("a/b", "gone", ids), *duplicated("a/b", "twice", ids[:2]))
    amount = Difference("c/d", "amount", "off", 1, -7, ("x",), "acme")
    report = AuditReport({"events": {"count": 5}}, (*found, amount), 3, 4, tuple(ids), {"more": 1})
    assert lost("a/b", "gone", []) == [] and found[0].request_ids == tuple(ids[:20])
    assert (report.lost, report.duplicated, report.ledger_error, report.clean) == (21, 2, 7, False)
    shown = report.as_json()
    differences = shown.pop("differences")
    assert [each["kind"] for each in differences] == ["lost", "duplicated", "amount"]
    assert differences[2] == {
        "check": "c/d",
        "kind": "amount",
        "message": "off",
        "count": 1,
        "units": -7,
        "request_ids": ("x",),
        "tenant_id": "acme",
    }
    assert shown == {
        "clean": False,
        "lost": 21,
        "duplicated": 2,
        "ledger_error": "0.000000000007",
        "ledger_error_units": 7,
        "pending": 3,
        "parked": 4,
        "without_receipt": {"count": 21, "request_ids": tuple(ids[:20])},
        "steps": {"events": {"count": 5}},
        "more": 1,
    }
    assert AuditReport({}, (), 0, 0).clean
    for pending, parked in ((1, 0), (0, 1)):
        assert not AuditReport({}, (), pending, parked).clean


def test_what_waits_for_an_audit(lite: Deployment) -> None:
    with lite.database.transaction() as session:
        for number, at in enumerate((START, START + HOUR), 1):
            session.add(UsageBatch(id=number, recorded_at=at, events=0, shard=0))
        plain = {"tenant_id": "acme", "code": "x", "reason": "", "payload": {}, "parked_at": START}
        session.add(ParkedEvent(request_id="a", **plain))
        session.add(ParkedEvent(request_id="b", released_at=START, **plain))
        session.add(ParkedEvent(request_id="c", dismissed_by="ann", **plain))
    lite.record(lite.event(), lite.event())
    with lite.database.transaction() as session:
        session.execute(update(UsageBatch).where(UsageBatch.events == 2).values(recorded_at=START))

    def _audited(**options: Any) -> AuditReport:
        return reconcile.audit_and_store(lite.database, lite.clock, closed_days=None, **options)

    report = _audited(in_transit=5, steps={"stripe": {"count": 1}})
    assert (report.pending, report.parked, report.clean) == (7, 1, False)
    assert report.steps["stripe"] == {"count": 1}
    assert report.steps["events"]["count"] == 2 and report.steps["ledger"] == {
        "count": 0,
        "units": 0,
    }
    assert _audited(pending_before=START).pending == 0
    assert _audited(pending_before=START + timedelta(microseconds=1)).pending == 2
    extra = Difference("own", "lost", "x")
    more = _audited(more=(lambda _session: [extra],))
    assert extra in more.differences
    with lite.database.read() as session:
        runs = session.query(AuditRun).order_by(AuditRun.id).all()
        assert [(run.at, run.clean) for run in runs] == [(START, False)] * 4
        assert runs[0].report["pending"] == 7


@pytest.mark.parametrize("open_only", [True, False])
def test_an_audit_of_open_days_names_closed_ones_as_a_step(
    lite: Deployment, open_only: bool
) -> None:
    lite.record(lite.event())
    lite.rate()
    lite.clock.advance(days=2)
    assert len(reconcile.close_days(lite.database, lite.clock)) == 1
    assert reconcile.close_days(lite.database, lite.clock) == []
    with lite.database.read() as session:
        steps = reconcile.audit(session, open_only=open_only).steps
    assert ("closed days" in steps) is open_only
    assert steps["charges"]["count"] == (0 if open_only else 1)
