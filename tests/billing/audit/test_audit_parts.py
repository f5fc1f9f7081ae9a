"""An audit that is divided into ranges of request ids and read by several connections finds what one
statement finds, on one snapshot."""

from datetime import timedelta

import pytest
from msgspec import structs
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from billing.audit import reconcile
from billing.closing import closing, row_ranges, row_sums
from billing.closing.row_ranges import Part
from billing.differences import EVERYTHING
from billing.usage import usage
from core.clock import FakeClock
from core.database import Database
from core.events import CountedBy, EngineCount
from tests.billing.audit.test_audit_faults import FAULTS, Fault, record, tell_a_story, tenant_daily
from tests.billing.conftest import Deployment, deployment_of


@pytest.fixture
def story(postgres_database: Database, monkeypatch: pytest.MonkeyPatch) -> Deployment:
    """Rows in every table, of which two make a range."""
    made = deployment_of(postgres_database, FakeClock())
    tell_a_story(made)
    with made.database.db_engine.connect() as connection:
        plain = connection.execution_options(isolation_level="AUTOCOMMIT")
        plain.execute(text("analyze"))
    monkeypatch.setattr(row_ranges, "ROWS", 2)
    return made


def test_the_ranges_hold_every_id_once(story: Deployment) -> None:
    with story.database.snapshot() as session:
        parts = row_ranges.parts_of(session, EVERYTHING)
    assert len(parts) > 3
    assert [part.first for part in parts[1:]] == [part.end for part in parts[:-1]]
    assert (parts[0].first, parts[-1].end) == ("", "")


def test_the_sums_are_those_of_one_statement(
    story: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    with story.database.snapshot() as session:
        for since in (EVERYTHING, closing.open_usage(session)):
            divided = row_sums.read(session, since)
            with monkeypatch.context() as patch:
                patch.setattr(row_ranges, "_bounds", lambda *_: [])
                whole = row_sums.read(session, since)
            assert sorted(divided.groups) == sorted(whole.groups) != []
            assert divided.event_sums() == whole.event_sums()
            assert divided.receipt_sums() == whole.receipt_sums()
            for day in whole.days:
                assert divided.sums(day) == whole.sums(day)
                assert sorted(divided.frozen(day)) == sorted(whole.frozen(day))


def test_every_connection_reads_the_snapshot_of_the_audit(
    story: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Usage is recorded and rated while the ranges are read: no part of the audit sees it."""
    plain, connections = row_sums._read_part, set[int]()

    def _read(session: Session, part: Part, how: object) -> object:
        connections.add(id(session))
        assert session.scalar(text("show transaction_read_only")) == "on"
        record(story, [story.event()])
        story.rate()
        return plain(session, part, how)  # type: ignore[arg-type]

    monkeypatch.setattr(row_sums, "_read_part", _read)
    with story.database.snapshot() as session:
        before = reconcile.audit(session)
    assert len(connections) > 1
    assert before.clean, before.differences
    assert before.steps["events"]["count"] == 11
    with story.database.snapshot() as session:
        after = reconcile.audit(session)
    assert after.clean and after.steps["events"]["count"] > 11


# One of each check of rows; SQLite's tests seed the others.
_ROWS = [
    fault
    for fault in FAULTS
    if fault.name
    in (
        "the gateway counts other tokens than the engine",
        "the event of a receipt is missing",
        "an event of a rated batch is not charged",
        "a charge has no event",
        "a closed day's charges are changed",
    )
]


@pytest.mark.parametrize("fault", _ROWS, ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found_in_its_range(story: Deployment, fault: Fault) -> None:
    with story.database.transaction() as session:
        session.execute(text("set local tollhouse.maintenance = 'on'"))
        session.execute(text("set local session_replication_role = 'replica'"))  # no triggers
        for statement in fault.statements:
            session.execute(text(statement.format(tenant_daily=tenant_daily())))
    with story.database.snapshot() as session:
        found = reconcile.audit(session).differences
    assert any(each.kind == fault.kind and fault.finds in each.message for each in found), found


def test_receipts_of_several_prompts_are_compared_with_the_other_rows(story: Deployment) -> None:
    """The receipts of an event with three prompts add up to it, so nothing is looked for again."""
    events = [
        structs.replace(
            story.event(input_tokens=30), engine_id="engine", counted_by=CountedBy.ENGINE
        )
        for _ in range(3)
    ]
    with story.database.transaction() as session:
        usage.record(session, events, story.clock)
        for each in events:
            counts = [
                EngineCount(
                    f"{each.request_id}.{number}", "engine", 10, each.cached_tokens if number == 0 else 0,
                    each.output_tokens + each.waived_tokens if number == 0 else 0, each.finished_at,
                    each.busy_us if number == 0 else 0,
                )
                for number in range(3)
            ]  # fmt: skip
            usage.store_receipts(session, counts)
    story.rate()
    with story.database.snapshot() as session:
        rows = row_sums.read(session)
        assert rows.receipts_agree and rows.receipts_complete
        assert reconcile.audit(session).clean
    with story.database.transaction() as session:
        session.execute(text("set local session_replication_role = 'replica'"))
        last = events[-1].request_id
        session.execute(text(f"delete from engine_receipts where request_id = '{last}.2'"))
    with story.database.snapshot() as session:
        found = reconcile.audit(session).differences
    assert [each.request_ids for each in found] == [(last,)]


def test_nothing_is_read_while_no_day_can_be_closed(lite: Deployment) -> None:
    record(lite, [lite.event()])
    lite.rate()
    statements: list[str] = []
    event.listen(
        lite.database.db_engine, "before_cursor_execute", lambda *a: statements.append(a[2])
    )
    assert reconcile.close_days(lite.database, lite.clock) == []
    assert not [each for each in statements if "charges" in each]
    lite.clock.advance(hours=26)
    assert reconcile.close_days(lite.database, lite.clock) == [
        lite.clock.now().replace(hour=0) - timedelta(days=1)
    ]
