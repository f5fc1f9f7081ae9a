"""What an audit says of a fault, in full: message, size, count, ids and tenant; and of which rows."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from billing import differences
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
from billing.closing import late_receipts, row_ranges
from billing.closing.row_ranges import Part
from billing.differences import EVERYTHING, Difference, Since
from billing.invoicing import reserved_numbers as numbers
from billing.usage import usage
from billing.usage.tables import Charge, ParkedEvent, UsageEventRow, UsageRetention
from core.database import Database
from core.events import CountedBy, EngineCount
from tests.billing.audit.test_audit_faults import story
from tests.billing.conftest import START, Deployment

__all__ = ["story"]
CENT, INSTANT = 10**10, timedelta(microseconds=1)


@pytest.fixture
def books(story: Database) -> Iterator[Session]:
    """The ledger of a story, whose changes are taken back."""
    with story.db_engine.connect() as connection:
        session = Session(connection)
        yield session
        session.rollback()


def run(session: Session, *statements: str) -> None:
    for statement in statements:
        assert session.execute(text(statement)).rowcount > 0, statement  # type: ignore[attr-defined]


def one(session: Session, query: str) -> Any:
    return session.execute(text(query)).scalar_one()


def test_a_difference_names_at_most_twenty_requests_and_counts_all() -> None:
    ids = [f"req_{n:02}" for n in range(21)]
    assert differences.lost("a/b", "gone", []) == []
    assert differences.lost("a/b", "gone", ids) == [
        Difference("a/b", "lost", "gone", 21, 0, tuple(ids[:20]))
    ]
    assert differences.duplicated("a/b", "twice", ids[:20]) == [
        Difference("a/b", "duplicated", "twice", 20, 0, tuple(ids[:20]))
    ]
    found = differences.amount("a/b", "off", -5, iter(ids), "acme")
    assert found == Difference("a/b", "amount", "off", 1, -5, tuple(ids[:20]), "acme")
    assert differences.amount("a/b", "off", 5) == Difference("a/b", "amount", "off", 1, 5, (), "")
    assert Since() == EVERYTHING == Since(0, "", 0, 0, None)


@pytest.mark.parametrize(
    ("column", "units"),
    [
        ("subtotal_minor", 3 * CENT),
        ("tax_minor", 3 * CENT),
        ("promo_minor", 2 * CENT),
        ("total_minor", CENT),
        ("prepaid_minor", CENT),
        ("due_minor", CENT),
        ("exact", 1),
    ],
)
def test_each_total_of_an_invoice_is_compared(books: Session, column: str, units: int) -> None:
    for step, sign in (("+ 1", 1), ("- 2", -1)):
        run(books, f"update invoices set {column} = {column} {step} where tenant_id = 'zeta'"
            " and status <> 'draft'")  # fmt: skip
        label = one(books, "select label from invoices where tenant_id = 'zeta' and number > 0")
        message = f"the totals of invoice {label} do not equal the sums of its lines"
        assert audit_ledger.invoices_add_up(books) == [
            Difference("invoices", "amount", message, 1, units, (), "zeta")
        ], sign


def test_numbers_of_each_seller_follow_each_other(books: Session) -> None:
    assert numbers.numbers_have_no_gap(books) == []
    run(books, "update invoices set number = number + 1 where number = 2")
    seller = one(books, "select max(seller_id) from invoices")
    message = f"seller {seller} has 2 numbers from 1 to 3"
    assert numbers.numbers_have_no_gap(books) == [Difference("invoices", "lost", message)]
    run(books, "update invoices set seller_id = 'other' where number = 3")
    assert numbers.numbers_have_no_gap(books) == []


def test_transactions_and_balances_are_told_with_their_size(books: Session) -> None:
    entry = one(books, "select max(id) from ledger_entries")
    run(books, f"update ledger_entries set units = units + 4 where id = {entry}")
    transaction = one(books, f"select transaction_id from ledger_entries where id = {entry}")
    off = Difference(
        "ledger", "amount", f"transaction {transaction} does not sum to zero in USD", 1, 4
    )
    assert audit_ledger.transactions_sum_to_zero(books) == [off]
    assert audit_ledger.transactions_sum_to_zero(books, Since(entry=entry - 1)) == [off]
    assert audit_ledger.transactions_sum_to_zero(books, Since(entry=entry)) == []
    row = books.execute(
        text(
            "select a.tenant_id, a.kind, a.balance from ledger_accounts a join ledger_entries e"
            f" on e.account_id = a.id where e.id = {entry}"
        )
    ).one()
    message = f"account {row[1]} has balance {row[2]}, its entries sum to {row[2] + 4}"
    wrong = Difference("ledger", "amount", message, 1, -4, (), row[0])
    assert audit_ledger.balances_are_sums(books) == [wrong]
    assert audit_ledger.balances_are_sums(books, Since(entry=entry)) == []


def test_an_account_without_entries_has_nothing(books: Session) -> None:
    run(books, "update ledger_accounts set balance = balance + 1 where kind = 'promotion'",
        "delete from ledger_entries where account_id in"
        " (select id from ledger_accounts where kind = 'promotion')")  # fmt: skip
    (found,) = audit_ledger.balances_are_sums(books)
    assert (found.units, found.tenant_id) == (10**11 + 1, "acme")
    assert found.message == f"account promotion has balance {10**11 + 1}, its entries sum to 0"


def test_grants_without_a_wallet_and_a_wallet_without_grants_are_both_told(books: Session) -> None:
    run(books, "update credit_grants set kind = 'prepaid', granted = granted + 3, remaining = 3",
        "update ledger_accounts set balance = balance - 5 where kind = 'promo'")  # fmt: skip
    found = audit_ledger.wallets_and_grants(books)
    assert {(d.message, d.units, d.tenant_id) for d in found if d.check == "grants/ledger"} == {
        ("prepaid grants have 3 left, the ledger has 0", 3, "acme"),
        ("promo grants have 0 left, the ledger has 5", -5, "acme"),
    }


def test_revenue_is_compared_by_transaction_and_names_its_charges(books: Session) -> None:
    transaction = one(books, "select max(transaction_id) from charges where tenant_id = 'zeta'")
    run(books, f"update charges set amount = amount + 2 where transaction_id = '{transaction}'")
    ids = books.execute(
        text(f"select request_id from charges where transaction_id = '{transaction}'")
    ).all()
    (found,) = audit_ledger.charges_and_ledger(books)
    assert (found.check, found.kind, found.count) == ("charges/ledger", "amount", 1)
    assert found.units == -2 * len(ids)
    assert sorted(found.request_ids) == sorted(row[0] for row in ids)
    assert found.message.startswith(f"transaction {transaction} has revenue ")
    run(books, f"delete from charges where transaction_id = '{transaction}'")
    (found,) = audit_ledger.charges_and_ledger(books)
    assert found.message.endswith("its charges sum to 0") and found.units > 0
    later = Since(batch=10**6, entry=10**6, day=START + timedelta(days=999))
    assert audit_ledger.charges_and_ledger(books, later) == []


def test_what_tenants_owe_is_compared_by_tenant(books: Session) -> None:
    for statement, units in (
        ("update invoices set credited_minor = credited_minor + 2 where tenant_id = 'zeta'"
         " and status = 'final'", 2 * CENT),
        ("update invoices set status = 'draft' where tenant_id = 'zeta' and status = 'final'", None),
        ("update usage_daily set amount = amount + 5 where tenant_id = 'acme' and at ="
         " (select max(at) from usage_daily where tenant_id = 'acme')", -5),
        ("update credit_uses set units = units + 7, bill_period_id = (select max(id) from"
         " billing_periods where tenant_id = 'acme' and closed_at is null) where id ="
         " (select max(id) from credit_uses)", 10**11 + 7),
    ):  # fmt: skip
        assert audit_ledger.receivables_are_open_amounts(books) == []
        run(books, statement)
        (found,) = audit_ledger.receivables_are_open_amounts(books)
        assert found.check == "invoices/ledger" and found.count == 1
        assert found.tenant_id == ("zeta" if "zeta" in statement else "acme")
        assert found.units == units or units is None
        owed = found.message.rpartition("sum to ")[2]
        assert found.message == (
            f"receivable is {int(owed) + found.units}, open and uninvoiced amounts sum to {owed}"
        )
        books.rollback()


def test_a_final_invoice_bills_its_period_and_no_other(books: Session) -> None:
    period = one(books, "select period_id from invoices where tenant_id = 'zeta' and number > 0")
    run(books, f"update charges set bill_period_id = '{period}' where tenant_id = 'acme' and"
        " request_id = (select max(request_id) from charges)")  # fmt: skip
    (found,) = audit_ledger.charges_and_invoices(books)
    assert (found.units, found.count, found.check) == (-43_500_000, 1, "charges/invoices")
    assert len(found.request_ids) == 5
    billed = 4 * (80 * 150_000 + 20 * 75_000 + 500_000 * 600_000)
    assert found.message == (
        f"the invoice of period {period} bills {billed}, its charges sum to {billed + 43_500_000}"
    )


def test_batches_are_told_with_what_they_lack_or_have_too_much(books: Session) -> None:
    batch, events = books.execute(text("select id, events from usage_batches where id = 1")).one()
    for change, kind in ((2, "lost"), (-1, "duplicated")):
        run(books, f"update usage_batches set events = {events + change} where id = {batch}")
        message = f"batch 1 was stored with {events + change} events, it has {events}"
        found = [Difference("batches/events", kind, message, abs(change))]
        assert audit_usage.batches_and_events(books) == found
        assert audit_usage.batches_and_events(books, Since(batch=batch)) == []
    run(books, f"delete from usage_events where batch_id = {batch}")
    (gone,) = audit_usage.batches_and_events(books)
    assert (gone.kind, gone.count) == ("lost", events - 1)


def test_charges_and_events_are_told_apart_and_together(books: Session) -> None:
    ids = sorted(row[0] for row in books.execute(text("select request_id from charges")))
    last = one(books, "select max(batch_id) from usage_events")
    run(
        books, f"update charges set output_tokens = output_tokens + 1 where request_id > '{ids[0]}'"
    )
    message = "the counts of the charge differ from those of its event"
    unequal = Difference("events/charges", "amount", message, len(ids) - 1, 0, tuple(ids[1:]))
    (found,) = audit_usage.events_and_charges(books)
    assert sorted(found.request_ids) == list(unequal.request_ids)
    assert (found.kind, found.count, found.message) == ("amount", len(ids) - 1, message)
    assert audit_usage.events_and_charges(books, Since(batch=last)) == []
    books.rollback()
    run(books, f"delete from charges where request_id = '{ids[0]}'")
    message = "the event is in a rated batch but has no charge"
    lost = Difference("events/charges", "lost", message, 1, 0, (ids[0],))
    assert audit_usage.events_and_charges(books) == [lost]
    assert audit_usage.events_and_charges(books, Since(batch=last)) == []
    run(books, "update usage_batches set rated_at = null")
    assert audit_usage.events_and_charges(books) == []
    books.rollback()
    run(books, f"delete from usage_events where request_id = '{ids[1]}'")
    alone = Difference("events/charges", "duplicated", "the charge has no event", 1, 0, (ids[1],))
    assert audit_usage.events_and_charges(books) == [alone]
    assert audit_usage.events_and_charges(books, Since(id=ids[1])) == [alone]
    assert audit_usage.events_and_charges(books, Since(id=ids[2])) == []


def test_a_parked_event_waits_for_its_charge(books: Session) -> None:
    first = one(books, "select min(request_id) from charges")
    run(books, f"delete from charges where request_id = '{first}'")
    fields = {"tenant_id": "acme", "code": "currency", "reason": "", "payload": {}}
    books.add(ParkedEvent(request_id=first, parked_at=START, **fields))
    books.flush()
    assert audit_usage.events_and_charges(books) == []


def test_a_wrong_charge_is_told_by_component_with_its_price(books: Session) -> None:
    row = books.execute(
        text("select request_id, price_version from charges where tenant_id = 'zeta'"
             " order by request_id limit 1")
    ).one()  # fmt: skip
    run(
        books, f"update charges set output_amount = output_amount - 5 where request_id = '{row[0]}'"
    )
    ids = sorted(
        each[0] for each in books.execute(text("select request_id from charges where tenant_id ="
                                               " 'zeta'"))
    )  # fmt: skip
    (found,) = audit_charges.charges_and_prices(books)
    cost = 4 * 500_000 * 600_000
    message = f"2000000 output at {row[1]} cost {cost}, but {cost - 5} is charged"
    assert found == Difference(
        "charges/prices", "amount", message, 1, -5, tuple(ids), "zeta"
    )  # at most 20, in order
    run(books, f"update charges set price_version = 'gone' where request_id = '{row[0]}'")
    unknown = [
        each for each in audit_charges.charges_and_prices(books) if "at gone" in each.message
    ]
    assert len(unknown) == 3 and {each.tenant_id for each in unknown} == {"zeta"}


def kept(session: Session, made: Deployment, **fields: Any) -> str:
    event = made.event(engine_id="engine", **fields)
    usage.record(session, [event], made.clock)
    return event.request_id


def receipt(session: Session, request_id: str, counts: tuple[int, ...], busy: int = 0) -> None:
    made = EngineCount(request_id, "engine", *counts, START, busy)
    assert usage.store_receipts(session, [made]) == 1


AGREES = (100, 20, 53)


@pytest.mark.parametrize(
    ("fields", "counts", "busy", "said"),
    [
        ({"counted_by": CountedBy.ENGINE}, AGREES, 0, ""),
        ({"counted_by": CountedBy.ENGINE}, (101, 20, 53), 0, "the token counts"),
        ({"counted_by": CountedBy.ENGINE}, (100, 21, 53), 0, "the token counts"),
        ({"counted_by": CountedBy.ENGINE}, (100, 20, 52), 0, "the token counts"),
        ({"counted_by": CountedBy.ENGINE}, AGREES, 1, "the busy time"),
        ({"counted_by": CountedBy.GATEWAY}, (999, 0, 53), 7, ""),
        ({"counted_by": CountedBy.GATEWAY}, (100, 20, 54), 0, "neither billed nor waived"),
        ({"counted_by": CountedBy.GATEWAY}, (100, 20, 52), 0, "neither billed nor waived"),
        ({"counted_by": CountedBy.GATEWAY}, (100, 20, 49), 0, "more tokens are billed"),
        ({"paid_by": "operator", "batch_job": "batch_1"}, (1, 1, 1), 0, ""),
        ({"paid_by": "operator", "finish_reason": "warm_up"}, (1, 1, 1), 0, ""),
        ({"paid_by": "operator"}, (1, 1, 1), 0, "the token counts"),
        ({"paid_by": "tenant", "batch_job": "batch_1"}, (1, 1, 1), 0, "the token counts"),
    ],
)
def test_a_receipt_is_compared_as_its_event_was_counted(
    lite: Deployment,
    session: Session,
    fields: dict[str, Any],
    counts: tuple[int, ...],
    busy: int,
    said: str,
) -> None:
    request_id = kept(session, lite, **fields)
    receipt(session, request_id, counts, busy)
    found = audit_receipts.receipts_and_events(session)
    assert [(each.kind, each.count, each.request_ids) for each in found] == (
        [("amount", 1, (request_id,))] if said else []
    )
    assert all(said in each.message for each in found)
    rows = audit_receipts.receipts_and_events(session, Since(batch=1))
    assert rows == [], "of a closed day"


@pytest.mark.parametrize("receipts", [[59], [30, 29]], ids=["one prompt", "two prompts"])
def test_what_a_late_receipt_adds_is_waived_once(lite: Deployment, receipts: list[int]) -> None:
    """The gateway had closed the request by its own count, of 50 billed and 3 waived tokens."""
    with lite.database.transaction() as session:
        request_id = kept(session, lite, counted_by=CountedBy.GATEWAY)
        agreeing = kept(session, lite, counted_by=CountedBy.GATEWAY)
        receipt(session, agreeing, AGREES)
    lite.rate()
    assert late_receipts.waive_late(lite.database, lite.clock) == 0, "no receipt came yet"
    with lite.database.transaction() as session:
        for number, generated in enumerate(receipts):
            name = request_id if len(receipts) == 1 else f"{request_id}.{number}"
            receipt(session, name, (100, 20, generated))
        [difference] = audit_receipts.receipts_and_events(session)
        assert difference.request_ids == (request_id,)
    assert late_receipts.waive_late(lite.database, lite.clock) == 1
    assert late_receipts.waive_late(lite.database, lite.clock) == 0
    lite.rate()
    with lite.database.read() as session:
        assert audit_receipts.receipts_and_events(session) == []
        rows = session.scalars(select(UsageEventRow).order_by(UsageEventRow.request_id)).all()
        sums = [(each.output_tokens, each.waived_tokens, each.quantity) for each in rows]
        assert sorted(sums) == sorted([(50, 3, 1), (0, 6, 0), (50, 3, 1)])
        charged = {each.request_id: each for each in session.scalars(select(Charge))}
        late = charged[request_id + late_receipts.LATE]
        assert late.waived_tokens == 6 and late.amount == 0
    with lite.database.read() as session:
        assert not reconcile.audit(session).differences


def test_receipts_of_numbered_prompts_are_summed(lite: Deployment, session: Session) -> None:
    request_id = kept(session, lite, counted_by=CountedBy.ENGINE, busy_us=9)
    receipt(session, f"{request_id}.0", (60, 15, 30), 4)
    receipt(session, f"{request_id}.1", (40, 5, 23), 5)
    assert audit_receipts.receipts_and_events(session) == []
    receipt(session, f"{request_id}.2", (0, 0, 1))
    (found,) = audit_receipts.receipts_and_events(session)
    assert found.request_ids == (request_id,)


def test_a_receipt_waits_for_its_event_until_the_moment_that_is_given(
    lite: Deployment, session: Session
) -> None:
    receipt(session, "req_1", AGREES)
    message = "the engine has a receipt, but there is no usage event"
    lost = [Difference("receipts/events", "lost", message, 1, 0, ("req_1",))]
    check: Callable[..., Any] = audit_receipts.receipts_and_events
    assert check(session) == check(session, received_before=START + INSTANT) == lost
    assert check(session, received_before=START) == []
    assert check(session, Since(id="req_1")) == lost
    assert check(session, Since(id="req_2")) == []
    retained = {"kept_from": START, "events": 0, "dropped_at": START}
    session.add(UsageRetention(floor_id="req_2", **retained))
    session.flush()
    assert check(session) == [] and audit_usage.first_id(session, EVERYTHING) == "req_2"
    assert audit_usage.first_id(session, Since(id="req_3")) == "req_3"


def test_an_event_that_an_engine_counted_has_a_receipt(lite: Deployment, session: Session) -> None:
    lacks = kept(session, lite, counted_by=CountedBy.ENGINE)
    by_hand = [kept(session, lite, counted_by=CountedBy.GATEWAY) for _ in range(2)]
    kept(session, lite)
    none = {"input_tokens": 0, "cached_tokens": 0, "output_tokens": 0, "waived_tokens": 0}
    kept(session, lite, counted_by=CountedBy.GATEWAY, **none)
    kept(session, lite, counted_by=CountedBy.GATEWAY, paid_by="operator")
    message = "the engine counted the event, but there is no receipt"
    lost = [Difference("receipts/events", "lost", message, 1, 0, (lacks,))]
    assert audit_receipts.receipts_and_events(session) == lost
    assert audit_receipts.billed_without_receipt(session) == sorted(by_hand)
    assert audit_receipts.billed_without_receipt(session, Since(batch=2)) == [by_hand[1]]
    receipt(session, lacks, AGREES)
    receipt(session, by_hand[0], AGREES)
    assert audit_receipts.receipts_and_events(session) == []
    assert audit_receipts.billed_without_receipt(session) == [by_hand[1]]


def test_an_audit_is_divided_by_ids_and_reads_late_usage_by_name(
    lite: Deployment, session: Session
) -> None:
    assert row_ranges.parts_of(session, EVERYTHING) == [Part()]
    late, on_time = kept(session, lite, request_id="req_1"), kept(session, lite, request_id="req_5")
    since = Since(batch=1, id="req_3")
    assert row_ranges.parts_of(session, since) == [Part("req_3")]
    since = Since(batch=0, id="req_3")
    assert row_ranges.parts_of(session, since) == [Part("req_3"), Part(ids=(late,))]
    retained = {"kept_from": START, "events": 0, "dropped_at": START}
    session.add(UsageRetention(floor_id="req_4", **retained))
    session.flush()
    assert row_ranges.parts_of(session, EVERYTHING) == [Part("", "req_4"), Part("req_4")]
    assert row_ranges.parts_of(session, Since(batch=9, id="req_4")) == [Part("req_4")]
    column = UsageEventRow.request_id
    assert Part().of(column) == []
    shown = {
        name: [
            str(each.compile(compile_kwargs={"literal_binds": True})) for each in part.of(column)
        ]
        for name, part in {
            "from": Part("req_3"),
            "to": Part("", "req_4"),
            "both": Part("req_3", "req_4"),
            "ids": Part(ids=(on_time,)),
        }.items()
    }
    first, end = "usage_events.request_id >= 'req_3'", "usage_events.request_id < 'req_4'"
    assert shown == {
        "from": [first],
        "to": [end],
        "both": [first, end],
        "ids": ["usage_events.request_id IN ('req_5')"],
    }


def test_what_a_failure_waived_is_free_where_waived_tokens_have_a_price(lite: Deployment) -> None:
    version = lite.price({"output": "10", "waived": "1"})
    nothing = {"input_tokens": 0, "cached_tokens": 0, "price_version": version.id}
    lite.record(lite.event(**nothing, output_tokens=5, waived_tokens=3))
    lite.record(lite.event(**nothing, output_tokens=4, waived_tokens=7, status=503))
    lite.record(lite.event(**nothing, output_tokens=0, waived_tokens=9, status=503, quantity=0))
    lite.record(lite.event(**nothing, output_tokens=0, waived_tokens=2, status=429, quantity=0))
    lite.rate()
    with lite.database.read() as session:
        report = reconcile.audit(session)
    assert report.clean, report.differences
    assert report.as_json()["steps"]["charges"]["units"] == 9 * 10_000_000 + 3 * 1_000_000
