"""A database that is restored from a backup while the payment provider and the customers went on."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import func, select

from billing import tasks
from billing.invoicing import credit_notes, invoice_run
from billing.invoicing.tables import Invoice, InvoiceLine, ReservedNumber
from billing.payments.tables import DunningCase
from core.database import Database
from core.errors import Conflict
from tests.billing.payments.stripe_deployment import Till
from tests.billing.recovery.restore_drill import open_drill, play, without_invoices

FOUND_BY = 101  # a seed whose drill loses the files and has an invoice at the provider


def test_a_restore_before_an_invoice_run_charges_nobody_again(till: Till, tmp_path: Path) -> None:
    """Not even while nobody has noticed the restore: the keys at the provider are the same."""
    path = Path(till.deployment.database.url.removeprefix("sqlite:///"))
    till.collect_by_stripe()
    till.leave_card()
    till.deployment.record(till.deployment.event(output_tokens=20_000_000))
    till.deployment.rate()
    with closing(sqlite3.connect(path)) as live, closing(sqlite3.connect(tmp_path / "bak")) as copy:
        live.backup(copy)
    till.deployment.clock.advance(days=40)
    for _ in range(2):
        invoice_run.run(till.deployment.database, till.deployment.clock, ["acme"])
        till.settle()
        till.deployment.database.close()
        for suffix in ("-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        shutil.copy(tmp_path / "bak", path)
        till.deployment.database = Database(f"sqlite:///{path}")
        till.told = 0
    invoices = till.stripe.books.objects["invoice"].values()
    assert [(each["number"], each["status"]) for each in invoices] == [("TH-000001", "paid")]


def test_an_invoice_that_was_issued_keeps_its_number_and_a_lost_document_keeps_others_off(
    tmp_path: Path,
) -> None:
    """A new tenant is billed first after the restore, and all usage of another one is lost."""
    with open_drill(tmp_path / "drill", 1) as drill:
        drill.use("acme")
        drill.tick()
        drill.copy()
        lost = drill.deployment.event(tenant_id="birch", output_tokens=10_000_000)
        drill.deployment.record(lost)
        drill.deployment.clock.advance(days=40)
        for _ in range(2):
            drill.tick()
        with drill.deployment.database.transaction() as session:
            invoice = session.scalars(select(Invoice).where(Invoice.tenant_id == "birch")).one()
            note = credit_notes.issue(
                session,
                invoice_id=invoice.id,
                net_minor=100,
                reason="late",
                reference="note 1",
                at=drill.deployment.clock.now(),
            )
        tasks.mark_position(drill.context)
        drill.restore(0)
        drill.deployment.tenant("aaron")
        drill.deployment.record(
            drill.deployment.event(
                tenant_id="aaron",
                output_tokens=10_000_000,
                occurred_at=drill.deployment.clock.now().replace(month=1),
            )
        )
        tasks.mark_position(drill.context)
        with drill.deployment.database.transaction() as session:
            known = session.scalars(select(Invoice)).first()
            assert known is None or known.number is None
        report = drill.recover()
        assert report.credit_notes == [
            f"{note.label} of birch: Issued on TH-000002 over 100 minor units before the database was "
            "restored."
        ]
        tasks.run_invoices(drill.context)
        drill.till.settle()
        tasks.audit(drill.context)
        with drill.deployment.database.read() as session:
            given = {each.tenant_id: each.label for each in session.scalars(select(Invoice))}
            lines = session.scalar(
                select(func.count())
                .select_from(InvoiceLine)
                .join(Invoice, Invoice.id == InvoiceLine.invoice_id)
                .where(Invoice.tenant_id == "birch")
            )
            note_numbers = session.scalars(
                select(ReservedNumber.number).where(ReservedNumber.kind == "credit_note")
            ).all()
        assert given == {"acme": "TH-000001", "birch": "TH-000002", "aaron": "TH-000003"}
        assert lines == 0 and note_numbers == [1]
        assert drill.named() == {("restored invoices", "amount")}
        drill.check()
        with drill.deployment.database.transaction() as session:
            invoice = session.scalars(select(Invoice).where(Invoice.tenant_id == "acme")).one()
            again = credit_notes.issue(
                session,
                invoice_id=invoice.id,
                net_minor=10,
                reason="late",
                reference="note 2",
                at=drill.deployment.clock.now(),
            )
        assert again.label == "TH-CN-000002"


def test_no_credit_note_is_numbered_while_the_database_is_behind(tmp_path: Path) -> None:
    with open_drill(tmp_path / "drill", 1) as drill:
        drill.use("acme")
        drill.deployment.clock.advance(days=40)
        tasks.run_invoices(drill.context)
        drill.copy()
        drill.use("acme")
        tasks.rate_events(drill.context)
        tasks.mark_position(drill.context)
        drill.restore(0)
        tasks.mark_position(drill.context)
        with drill.deployment.database.transaction() as session:
            invoice = session.scalars(select(Invoice)).one()
            with pytest.raises(Conflict, match="restored from a backup") as refused:
                credit_notes.issue(
                    session,
                    invoice_id=invoice.id,
                    net_minor=1,
                    reason="x",
                    reference="x",
                    at=drill.deployment.clock.now(),
                )
            session.rollback()
        assert refused.value.code == "database_behind" and "tollhouse recover" in str(
            refused.value.next_step
        )


def test_a_payment_pays_the_invoice_that_it_paid_before_the_restore(tmp_path: Path) -> None:
    """Not the usage of the month after: its customer would owe a month that is paid, and be suspended."""
    with open_drill(tmp_path / "drill", 1) as drill:
        for tenant in ("acme", "birch"):
            drill.use(tenant)
        drill.tick()
        drill.copy()
        drill.deployment.clock.advance(days=40)
        for _ in range(3):
            drill.tick()
        drill.use("acme")
        drill.use("birch")
        for _ in range(2):
            drill.tick()
        paid = drill.at_stripe("invoice")
        assert [each["status"] for each in paid] == ["paid", "paid"]
        drill.restore(0)
        drill.unreceipted.clear()
        drill.deployment.clock.advance(days=20)  # past the due date
        tasks.mark_position(drill.context)
        drill.recover()
        with drill.deployment.database.read() as session:
            reserved = {
                row.label: row.external_id for row in session.scalars(select(ReservedNumber))
            }
        assert reserved == {each["number"]: each["id"] for each in paid}
        tasks.rate_events(drill.context)
        tasks.run_invoices(drill.context)
        tasks.remind_and_suspend(drill.context)
        for _ in range(2):
            tasks.push_payments(drill.context)
        tasks.remind_and_suspend(drill.context)
        with drill.deployment.database.read() as session:
            again = {each.label: each for each in session.scalars(select(Invoice))}
            reminded = session.scalar(select(func.count()).select_from(DunningCase))
        for each in paid:
            found = again[each["number"]]
            assert (found.external_id, found.status) == (each["id"], "paid")
            assert found.due_minor == found.paid_minor == each["total"]
        assert reminded == 0
        assert drill.named() == set()
        drill.check()


def test_nobody_pays_twice_and_no_number_is_given_twice(tmp_path: Path) -> None:
    named = play(tmp_path / "drill", FOUND_BY)
    assert {check for check, _ in named} <= {"restored invoices"}


def test_the_drill_finds_that_the_provider_s_invoices_are_not_read(tmp_path: Path) -> None:
    """Where the files with the numbers are lost, too, only the provider knows of them."""
    with without_invoices(), pytest.raises(AssertionError):
        play(tmp_path / "fault", FOUND_BY)


@pytest.mark.proof
def test_more_restores(tmp_path: Path) -> None:
    """`python -m benchmarks.restores` plays a hundred."""
    for seed in range(12):
        named = play(tmp_path / str(seed), seed)
        assert {check for check, _ in named} <= {"restored invoices"}
