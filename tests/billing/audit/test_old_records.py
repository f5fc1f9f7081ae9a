"""Records of older versions name the operator `house` in `paid_by`; every reader gets `operator`."""

from datetime import timedelta

import msgspec
from sqlalchemy import insert, select, text

from billing.exports.subjects import SUBJECTS, Period
from billing.usage.tables import UsageEventRow
from core.events import UsageEvent
from tests.billing.conftest import Deployment


def test_a_spooled_event_of_an_older_version_is_read_as_paid_by_the_operator(
    lite: Deployment,
) -> None:
    spooled = msgspec.json.encode(lite.event(paid_by="tenant")).replace(
        b'"paid_by":"tenant"', b'"paid_by":"house"'
    )
    assert b"house" in spooled
    assert msgspec.json.decode(spooled, type=UsageEvent).paid_by == "operator"


def test_a_stored_row_of_an_older_version_is_exported_as_paid_by_the_operator(
    deployment: Deployment,
) -> None:
    deployment.record(deployment.event())
    table = UsageEventRow.__table__
    with deployment.database.transaction() as session:
        old = dict(session.execute(select(table)).mappings().one())
        old |= {"request_id": "req_old", "paid_by": "house"}
        session.execute(insert(table).values(old))
        raw = session.scalars(text("select paid_by from usage_events"))
        assert set(raw) == {None, "house"}
        now = deployment.clock.now()
        period = Period(now - timedelta(days=1), now + timedelta(days=1))
        usage = SUBJECTS["usage"]
        names = [column.name for column in usage.columns]
        rows = [dict(zip(names, row, strict=True)) for row in usage.rows(session, None, period)]
    assert {row["request_id"]: row["paid_by"] for row in rows}["req_old"] == "operator"
