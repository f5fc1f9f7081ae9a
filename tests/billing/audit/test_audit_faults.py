"""Each audit check finds a fault that is seeded for it, and finds nothing before."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
from msgspec import structs
from sqlalchemy import event, text
from sqlalchemy.orm import Session

from billing.audit import (
    charges as audit_charges,
)
from billing.audit import (
    ledger as audit_ledger,
)
from billing.audit import (
    receipts as audit_receipts,
)
from billing.audit import (
    reconcile,
)
from billing.audit import (
    usage as audit_usage,
)
from billing.audit.reconcile import Check
from billing.closing import closing
from billing.invoicing import invoice_run
from billing.invoicing import reserved_numbers as numbers
from billing.ledger import credits
from billing.usage import usage
from core.clock import FakeClock
from core.database import Database
from core.events import Components, CountedBy, EngineCount, UsageEvent
from core.money import Money
from tests.billing.conftest import Deployment, deployment_of


@dataclass(frozen=True)
class Fault:
    check: Check
    name: str
    statements: tuple[str, ...]
    finds: str  # part of the message
    kind: str = "amount"
    units: tuple[int, ...] = (0,)  # picounits of what the check finds, ascending


_FIRST = "(select min(request_id) from {})"
_DIVIDED = "(select min(request_id) from usage_events where components is not null)"
FAULTS = (
    Fault(
        audit_receipts.receipts_and_events,
        "the gateway counts other tokens than the engine",
        ("update engine_receipts set generated_tokens = generated_tokens + 1"
         f" where request_id = {_FIRST.format('engine_receipts')}",),
        "token counts",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the gateway counts another prompt than the engine",
        ("update engine_receipts set prompt_tokens = prompt_tokens + 1"
         f" where request_id = {_FIRST.format('engine_receipts')}",),
        "token counts",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the gateway counts other cached tokens than the engine",
        ("update engine_receipts set cached_tokens = cached_tokens + 1"
         f" where request_id = {_FIRST.format('engine_receipts')}",),
        "token counts",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the event has another busy time than the receipt",
        ("update engine_receipts set busy_us = busy_us + 1"
         f" where request_id = {_FIRST.format('engine_receipts')}",),
        "busy time",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the event of a receipt is missing",
        (f"delete from usage_events where request_id = {_FIRST.format('engine_receipts')}",),
        "no usage event",
        "lost",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the receipt of an event is missing",
        (f"delete from engine_receipts where request_id = {_FIRST.format('engine_receipts')}",),
        "there is no receipt",
        "lost",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "one of several prompts is missing in the event",
        ("insert into engine_receipts select request_id || '.1', engine_id, 1, 0, 1, received_at, 0"
         f" from engine_receipts where request_id = {_FIRST.format('engine_receipts')}",),
        "token counts",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the gateway bills more than it received from the engine",
        ("update usage_events set counted_by = 'gateway', output_tokens = output_tokens + 4"
         f" where request_id = {_FIRST.format('engine_receipts')}",),
        "more tokens are billed",
    ),
    Fault(
        audit_receipts.receipts_and_events,
        "the gateway lost its connection and waived fewer tokens than the engine generated",
        ("update usage_events set counted_by = 'gateway', output_tokens = output_tokens - 1"
         f" where output_tokens > 0 and request_id = {_FIRST.format('engine_receipts')}",),
        "neither billed nor waived",
    ),
    Fault(
        audit_usage.batches_and_events,
        "an event of a batch is missing",
        (f"delete from usage_events where request_id = {_FIRST.format('usage_events')}",),
        "it has",
        "lost",
    ),
    Fault(
        audit_usage.batches_and_events,
        "a batch has an event too many",
        ("update usage_batches set events = events - 1"
         " where id = (select min(id) from usage_batches)",),
        "it has",
        "duplicated",
    ),
    Fault(
        audit_usage.events_and_charges,
        "an event of a rated batch is not charged",
        (f"delete from charges where request_id = {_FIRST.format('charges')}",),
        "no charge",
        "lost",
    ),
    Fault(
        audit_usage.events_and_charges,
        "a charge has no event",
        (f"delete from usage_events where request_id = {_FIRST.format('charges')}",),
        "has no event",
        "duplicated",
    ),
    Fault(
        audit_usage.events_and_charges,
        "a charge has other counts than its event",
        ("update charges set cached_tokens = cached_tokens + 1"
         f" where request_id = {_FIRST.format('charges')}",),
        "differ from those of its event",
    ),
    Fault(
        audit_usage.events_and_charges,
        "a charge is another tenant's",
        (f"update charges set tenant_id = 'other' where request_id = {_FIRST.format('charges')}",),
        "differ from those of its event",
    ),
    Fault(
        audit_charges.charges_and_prices,
        "a component is charged at another price",
        ("update charges set output_amount = output_amount + 5, amount = amount + 5"
         f" where request_id = {_FIRST.format('charges')}",),
        "is charged",
        units=(5,),
    ),
    *(
        Fault(
            audit_charges.charges_and_roll_ups,
            f"{table} has other sums than the charges",
            (f"update {table} set amount = amount + 1, output_amount = output_amount + 1"
             f" where tenant_id = 'acme'",),
            table,
            units=units,
        )
        for table, units in (("usage_hourly", (1, 1)), ("usage_daily", (-2, 1, 1)))
    ),
    Fault(
        audit_charges.charges_and_roll_ups,
        "the roll-up over all tenants has other sums",
        ("update {tenant_daily} set output_tokens = output_tokens + 1",),
        "{tenant_daily}",
        units=(0, 0),
    ),
    *(
        Fault(
            audit_charges.charges_and_roll_ups,
            f"{table} has lost its rows",
            (f"delete from {table} where tenant_id = 'acme'",),
            f"{finds} sums to ()",
            units=units,
        )
        for table, finds, units in (
            ("usage_hourly", "usage_hourly", (-1_200_054_000_000, -130_500_000)),
            ("{tenant_daily}", "{tenant_daily}", (-1_200_184_500_000,)),
            (
                "usage_daily",
                "usage_daily",
                (-1_200_054_000_000, -130_500_000, 1_200_184_500_000),
            ),
        )
    ),
    Fault(
        closing.closed_days_are_unchanged,
        "a closed day's charges are changed",
        (f"update charges set amount = amount + 1 where request_id = {_FIRST.format('charges')}",),
        "was closed with",
        units=(0, 1),
    ),
    Fault(
        closing.closed_days_are_unchanged,
        "frozen sums are changed",
        ("update closed_days set sums = replace(sums, '\"events\": 8', '\"events\": 9')"
         " where sums like '%\"events\": 8%'",),
        "were changed",
        units=(0, 0),
    ),
    Fault(
        audit_ledger.transactions_sum_to_zero,
        "an entry is changed",
        ("update ledger_entries set units = units + 1"
         " where id = (select min(id) from ledger_entries)",),
        "does not sum to zero",
        units=(1,),
    ),
    Fault(
        audit_ledger.balances_are_sums,
        "a balance is changed",
        ("update ledger_accounts set balance = balance + 1 where kind = 'receivable'",),
        "its entries sum to",
        units=(1, 1),
    ),
    Fault(
        audit_ledger.charges_and_ledger,
        "the revenue posted is not the sum of the charges",
        ("update charges set amount = amount + 7"
         f" where request_id = {_FIRST.format('charges')}",),
        "has revenue",
        units=(-7,),
    ),
    Fault(
        audit_ledger.wallets_and_grants,
        "a grant has more left than its wallet",
        ("update credit_grants set remaining = remaining + 1",),
        "grants have",
        units=(-1, 1),
    ),
    Fault(
        audit_ledger.wallets_and_grants,
        "a wallet has more than its grants",
        ("update ledger_accounts set balance = balance - 5 where kind = 'promo'",),
        "grants have",
        units=(-5,),
    ),
    Fault(
        audit_ledger.wallets_and_grants,
        "a wallet has no grants, and grants have no wallet",
        ("update credit_grants set kind = 'prepaid', granted = granted + 3, remaining = 3",
         "update ledger_accounts set balance = balance - 5 where kind = 'promo'"),
        "grants have",
        units=(-5, 3),
    ),
    Fault(
        audit_ledger.wallets_and_grants,
        "a use of a grant is missing",
        ("delete from credit_uses where id = (select min(id) from credit_uses)",),
        "its uses sum to",
        units=(10**11,),
    ),
    Fault(
        audit_ledger.charges_and_invoices,
        "an invoice bills more than its charges",
        ("update invoice_lines set exact = exact + 3 where id = (select min(l.id) from"
         " invoice_lines l join invoices i on i.id = l.invoice_id where i.status <> 'draft'"
         " and l.kind = 'usage')",),
        "bills",
        units=(3,),
    ),
    Fault(
        audit_ledger.invoices_add_up,
        "a line is changed after its invoice is final",
        ("update invoice_lines set amount_minor = amount_minor + 1 where id = (select min(l.id)"
         " from invoice_lines l join invoices i on i.id = l.invoice_id"
         " where i.status <> 'draft')",),
        "sums of its lines",
        units=(10**10,),
    ),
    Fault(
        audit_ledger.receivables_are_open_amounts,
        "a payment is booked on the invoice alone",
        ("update invoices set paid_minor = paid_minor + 1 where status <> 'draft'",),
        "receivable is",
        units=(10**10, 10**10),
    ),
    Fault(
        numbers.numbers_have_no_gap,
        "a number is skipped",
        ("update invoices set number = number + 5 where id ="
         " (select id from invoices where number = (select max(number) from invoices))",),
        "numbers from",
        "lost",
    ),
    Fault(
        audit_usage.events_and_charges,
        "a charge loses the cache writes of its event",
        (f"update charges set cache_write_5m_tokens = 0 where request_id = {_DIVIDED}",),
        "components of the charge differ",
    ),
    Fault(
        audit_usage.events_and_charges,
        "a charge has reasoning that its event does not have",
        ("update charges set reasoning_tokens = 1"
         f" where request_id = {_FIRST.format('charges')}",),
        "components of the charge differ",
    ),
    Fault(
        audit_usage.events_and_charges,
        "the parts of an answer are more than the whole",
        ("update charges set reasoning_tokens = output_tokens + 1"
         f" where request_id = {_DIVIDED}",
         """update usage_events set components = '{{"cache_write_5m"\\:30,"reasoning"\\:51}}'"""
         f" where request_id = {_DIVIDED}"),
        "components of the charge are more than its tokens",
    ),
    Fault(
        numbers.restored_invoices,
        "an invoice of before a restore is made again with another amount",
        ("insert into reserved_numbers (seller_id, kind, number, label, tenant_id, document_id,"
         " currency, due_minor, reason, reserved_at, used_at) select seller_id, 'invoice', number,"
         " label, tenant_id, id, currency, due_minor - 1, 'it', drafted_at, drafted_at from invoices"
         " where number = (select max(number) from invoices)",),
        "before a restore",
        units=(10**10,),
    ),
)  # fmt: skip


def tell_a_story(made: Deployment) -> None:
    """Usage with receipts, credit, a final invoice of each of two tenants, a correction and usage
    that is not invoiced: rows in every table that a check reads."""
    made.tenant("zeta")
    with made.database.transaction() as session:
        grant(session, made)
    for tenant_id in ("acme", "zeta"):
        record(made, [made.event(tenant_id=tenant_id, output_tokens=500_000) for _ in range(4)])
    made.clock.advance(days=40)
    invoice_run.run(made.database, made.clock, current=False)
    divided = Components(cache_write_5m=30, reasoning=8)
    record(made, [made.event(), made.event(), made.event(components=divided)])
    made.rate()
    assert reconcile.close_days(made.database, made.clock)


def grant(session: Session, made: Deployment, reference: str = "welcome") -> None:
    credits.grant(
        session,
        tenant_id="acme",
        kind="promo",
        money=Money(10**11, "USD"),
        reference=reference,
        at=made.clock.now(),
    )


def record(made: Deployment, events: list[UsageEvent]) -> None:
    by_engine = {"engine_id": "engine", "counted_by": CountedBy.ENGINE}
    events = [structs.replace(each, **by_engine) for each in events]
    with made.database.transaction() as session:
        usage.record(session, events, made.clock)
        usage.store_receipts(
            session,
            [
                EngineCount(
                    e.request_id, "engine", e.input_tokens, e.cached_tokens,
                    e.output_tokens + e.waived_tokens, e.finished_at, e.busy_us,
                )
                for e in events
            ],
        )  # fmt: skip


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One ledger; each test changes it in a transaction that is rolled back."""
    from migrations.run import upgrade

    database = Database(f"sqlite:///{tmp_path_factory.mktemp('ledger')}/ledger.db")
    upgrade(database)
    tell_a_story(deployment_of(database, FakeClock()))
    with database.transaction() as session:
        names = session.scalars(text("select name from sqlite_master where type = 'trigger'"))
        for name in names.all():
            session.execute(text(f"drop trigger {name}"))
    yield database
    database.close()


def tenant_daily() -> str:
    from billing.usage.tables import DailyTenantUsage

    return DailyTenantUsage.__tablename__


def test_the_story_is_clean_and_has_rows_for_every_check(story: Database) -> None:
    with story.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report.differences
    assert all(
        report.steps[name]["count"]
        for name in ("receipts", "events", "charges", "ledger", "invoices")
    )


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check.__name__}: {fault.name}")
def test_a_seeded_fault_is_found_by_its_check(story: Database, fault: Fault) -> None:
    with story.read() as session:
        assert fault.check(session) == []
    with story.db_engine.connect() as connection:
        session = Session(connection)
        for statement in fault.statements:
            changed = session.execute(text(statement.format(tenant_daily=tenant_daily())))
            assert changed.rowcount > 0, "the fault was not seeded"  # type: ignore[attr-defined]
        found = fault.check(session)
        whole = reconcile.audit(session).differences  # from sums that the checks share
        session.rollback()
    wanted = fault.finds.format(tenant_daily=tenant_daily())
    for differences in (found, whole):
        assert any(each.kind == fault.kind and wanted in each.message for each in differences), (
            differences
        )
    assert set(found) <= set(whole)
    assert sorted(each.units for each in found) == list(fault.units)
    assert {each.count for each in found} == {1}


_LATEST = "where at = (select max(at) from {table}) and tenant_id = 'acme'"


@pytest.mark.parametrize("table", ["usage_hourly", "{tenant_daily}", "usage_daily"])
@pytest.mark.parametrize("act", ["delete from {table}", "update {table} set amount = amount + 9"])
def test_a_fault_in_the_roll_ups_of_an_open_day_is_found_with_its_size(
    story: Database, table: str, act: str
) -> None:
    name = table.format(tenant_daily=tenant_daily())
    billed = 130_500_000  # picodollars of the three requests of that day
    size = 9 if act.startswith("update") else -billed
    with story.db_engine.connect() as connection:
        session = Session(connection)
        session.execute(text(f"{act} {_LATEST}".format(table=name)))
        found = audit_charges.charges_and_roll_ups(session, closing.open_usage(session))
        session.rollback()
    of_the_day = {each.message.split()[0]: each for each in found if " of 20" in each.message}
    others = {"usage_hourly", tenant_daily()}
    assert of_the_day.keys() == (others if name == "usage_daily" else {name})
    for each in of_the_day.values():
        assert each.units == (-size if name == "usage_daily" else size)
        assert (each.tenant_id, each.count) == ("acme", 1)


def test_a_clean_audit_reads_each_large_table_few_times(story: Database) -> None:
    statements: list[str] = []

    def _note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(f"{statement} ")

    event.listen(story.db_engine, "before_cursor_execute", _note)
    try:
        with story.read() as session:
            assert reconcile.audit(session).clean
    finally:
        event.remove(story.db_engine, "before_cursor_execute", _note)
    # Charges: with the events, by ledger transaction, and their number by the primary key. The rows of
    # divided usage are read with their events once more.
    for table, most in (("usage_events", 3), ("charges", 4), ("engine_receipts", 2)):
        reads = [each for each in statements if re.search(rf"(FROM|JOIN) {table}\b", each)]
        assert len(reads) <= most, (table, reads)


def test_every_check_has_a_fault() -> None:
    checks: set[Callable[..., object]] = set(reconcile.CHECKS)
    assert checks == {fault.check for fault in FAULTS}


def test_pending_and_parked_usage_is_not_clean(lite: Deployment) -> None:
    lite.record(lite.event())
    with lite.database.read() as session:
        report = reconcile.audit(session)
        assert (report.pending, report.clean, report.differences) == (1, False, ())
        early = reconcile.audit(session, pending_before=lite.clock.now() - timedelta(minutes=1))
        assert early.clean, "usage that has just arrived is not late"
    lite.rate()
    with lite.database.read() as session:
        assert reconcile.audit(session).clean
    lite.record(lite.event(price_version="unknown"))
    with lite.database.read() as session:
        report = reconcile.audit(session)
        assert (report.parked, report.clean) == (1, False)


def test_an_audit_of_the_open_days_does_not_read_closed_ones(lite: Deployment) -> None:
    record(lite, [lite.event() for _ in range(3)])
    lite.rate()
    lite.clock.advance(days=3)
    record(lite, [lite.event()])
    lite.rate()
    assert len(reconcile.close_days(lite.database, lite.clock)) == 2
    assert reconcile.close_days(lite.database, lite.clock) == []
    with lite.database.transaction() as session:
        first = session.scalar(text("select min(request_id) from charges"))
        last = session.scalar(text("select max(request_id) from charges"))
        session.execute(text("drop trigger append_only_charges_update"))
        session.execute(
            text(
                "update charges set cached_tokens = cached_tokens + 1 where request_id in (:a, :b)"
            ),
            {"a": first, "b": last},
        )
    found = {}
    with lite.database.snapshot() as session:
        for open_only in (True, False):
            report = reconcile.audit(session, open_only=open_only)
            found[open_only] = [
                each.request_ids for each in report.differences if each.check == "events/charges"
            ]
    assert found == {True: [(last,)], False: [tuple(sorted([first, last]))]}


def test_a_day_with_unrated_or_differing_usage_stays_open(lite: Deployment) -> None:
    record(lite, [lite.event()])
    lite.clock.advance(days=3)
    assert reconcile.close_days(lite.database, lite.clock) == []
    lite.rate()
    with lite.database.transaction() as session:
        session.execute(text("drop trigger append_only_charges_delete"))
        session.execute(text("delete from charges"))
    assert reconcile.close_days(lite.database, lite.clock) == []


def test_the_days_before_one_with_unrated_usage_are_closed(lite: Deployment) -> None:
    first = lite.clock.now().replace(hour=0, minute=0, second=0, microsecond=0)
    record(lite, [lite.event()])
    lite.rate()
    lite.clock.advance(days=1)
    record(lite, [lite.event()])
    lite.clock.advance(days=4)
    assert reconcile.close_days(lite.database, lite.clock) == [first]
    lite.rate()
    later = [first + timedelta(days=number) for number in (1, 2, 3)]
    assert reconcile.close_days(lite.database, lite.clock) == later


def test_a_generation_that_is_billed_without_a_receipt_is_reported(lite: Deployment) -> None:
    engine = {"counted_by": CountedBy.GATEWAY}
    record(lite, [lite.event(**engine)])
    with lite.database.read() as session:
        assert reconcile.audit(session).without_receipt == ()
    billed, prompt = lite.event(**engine), lite.event(output_tokens=0, waived_tokens=9, **engine)
    nothing = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0}
    lite.record(
        billed,
        prompt,
        lite.event(),
        lite.event(**engine, **nothing),
        lite.event(**engine, paid_by="operator"),
    )
    lite.rate()
    with lite.database.read() as session:
        report = reconcile.audit(session)
    assert report.without_receipt == tuple(sorted([billed.request_id, prompt.request_id]))
    assert report.clean, "a killed engine is no error of the books"
    shown = report.as_json()["without_receipt"]
    assert (shown["count"], len(shown["request_ids"])) == (2, 2)
