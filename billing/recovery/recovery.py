"""`tollhouse recover`: brings back what the payment provider and the marks hold of what a restored
database lost, and lists the rest. Everything is idempotent, so that it can be killed and run again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_account
from billing.accounts.tables import BillingAccount, BillingPeriod, Seller
from billing.invoicing import reserved_numbers as numbers
from billing.invoicing.tables import CreditNote, Invoice, ReservedNumber
from billing.ledger.tables import LedgerTransaction
from billing.payments import commands, compare, posting, settlement, top_ups
from billing.payments.base import InvoiceState, PaymentProvider, PaymentState, Status, Window
from billing.payments.provider_snapshot import ALL_TIME, ProviderSnapshot, fetch
from billing.payments.tables import Payment, PaymentCustomer
from billing.recovery import acts, marks, places
from billing.recovery.acts import LostActs, Row
from billing.recovery.guard import BEFORE
from billing.recovery.places import Directory
from billing.restores import restores
from billing.restores.tables import Recovery, RestoreMark
from core.clock import Clock
from core.database import Database, insert_new
from core.errors import TollhouseError
from core.settings import Settings
from core.tenants import epochs
from core.tenants.models import ApiKey, Member, Operator, Tenant

_NUMBERED = "A document with this number was issued before the database was restored."
_UNKNOWN = (
    "The number was given before the database was restored, to a document that nothing names."
)


@dataclass
class Report:
    """What was brought back, and what customers lost. Names, one a line."""

    since: str = ""  # the database has everything until then
    invoices: list[str] = field(
        default_factory=list
    )  # numbers that their tenant and period get again
    skipped: list[str] = field(default_factory=list)  # numbers that nobody gets
    credit_notes: list[str] = field(default_factory=list)  # lost, to be issued again by a person
    customers: list[str] = field(default_factory=list)  # of the provider, adopted
    top_ups: list[str] = field(default_factory=list)  # adopted from the provider
    posted: int = 0  # payments, refunds and disputes that the provider holds
    reported: int = 0  # counts of usage that were reported to the provider
    refused: list[str] = field(default_factory=list)  # keys, members, operators that ended again
    lost_payments: list[str] = field(default_factory=list)  # by hand, or credit: to be posted again
    lost_changes: list[str] = field(default_factory=list)  # of the audit log, to be made again
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Recover:
    database: Database
    settings: Settings
    clock: Clock
    provider: PaymentProvider
    more: tuple[Path, ...] = ()  # folders `restore` of other machines
    report: Report = field(default_factory=Report)

    def run(self) -> Report:
        """Raises TryLater if the provider does not answer: nothing is enabled then."""
        lost, filed, since = self._lost()
        self.report.since = since.isoformat()
        snapshot = ProviderSnapshot(self.provider.name, self.clock.now())
        if self.provider.collects:
            window = Window(since - BEFORE, self.clock.now() + timedelta(days=1))
            window = ALL_TIME if since == ALL_TIME.since else window
            self._customers(window)
            snapshot = fetch(self.database, self.provider, self.clock.now(), window)
        with self.database.transaction() as session:
            self._numbers(session, lost, filed, snapshot)
            self._reported(session, lost)
            self._end_again(session, lost)
        self._top_ups(snapshot)
        if self.provider.collects:
            self.report.posted = compare.catch_up(self.database, self.clock, snapshot)
        with self.database.read() as session:
            self._list_lost(session, lost)
        self._finish(lost, filed)
        return self.report

    def _lost(self) -> tuple[LostActs, list[marks.FiledMark], datetime]:
        """The acts outside that the database lacks, the latest marks outside, and the time until which
        the database has everything."""
        every: list[places.Place] = [places.local(self.settings)]
        shared = places.shared(self.settings)
        every += [shared] if shared is not None else []
        every += [Directory(path) for path in self.more]
        with self.database.read() as session:
            rows = session.execute(select(RestoreMark.position, RestoreMark.token)).all()
            last = marks.latest(session)
        filed = marks.filed(every)
        own = {acts.file_name(position, token) for position, token in rows}
        first = min((row[0] for row in rows), default=0)
        lost = acts.read_lost(every, marks.ACTS, own, first)
        if last is None:
            return lost, filed, ALL_TIME.since
        begins = min([*lost.positions, *(each.position for each in filed), last.position + 1])
        with self.database.read() as session:
            since = session.scalar(
                select(func.max(RestoreMark.at)).where(RestoreMark.position < begins)
            )
        return lost, filed, since or ALL_TIME.since

    def _customers(self, window: Window) -> None:
        """Without them a tenant would get a second one, without a card."""
        adopted = []
        for tenant_id, external_id in self.provider.customers(window):
            with self.database.transaction() as session:
                if session.get(Tenant, tenant_id) is None:
                    continue
                ensure_account(session, tenant_id, self.clock.now())
                fields = {
                    "tenant_id": tenant_id,
                    "provider": self.provider.name,
                    "external_id": external_id,
                    "created_at": self.clock.now(),
                }
                table: Any = PaymentCustomer.__table__
                if insert_new(session, table, [fields], "tenant_id", "provider"):
                    adopted.append((tenant_id, external_id))
        for tenant_id, external_id in adopted:
            methods = self.provider.methods(external_id)
            with self.database.transaction() as session:
                name, now = self.provider.name, self.clock.now()
                posting.customer(session, name, external_id, methods, now)
            self.report.customers.append(f"{tenant_id}: {external_id}")

    def _numbers(
        self,
        session: Session,
        lost: LostActs,
        filed: list[marks.FiledMark],
        snapshot: ProviderSnapshot,
    ) -> None:
        """Reserve every number that may have been given since, and go on after them."""
        sellers = {
            each.id: each
            for each in session.scalars(select(Seller).order_by(Seller.id).with_for_update())
        }
        known = _Known.read(session)
        rows = [*_of_acts(lost), *_of_provider(sellers.values(), snapshot)]
        found: dict[tuple[str, str, int], Row] = {}
        for row in rows:
            key = (row["seller_id"], row["kind"], row["number"])
            if row["seller_id"] in sellers and not known.has(row):
                named = found.setdefault(key, row)
                if named["document_id"] == row["document_id"]:
                    named["external_id"] = named.get("external_id") or row.get("external_id")
        for seller in sellers.values():
            self._of_seller(session, seller, found, [each.numbers for each in filed])

    def _of_seller(
        self,
        session: Session,
        seller: Seller,
        found: dict[tuple[str, str, int], Row],
        filed: list[dict[str, list[int]]],
    ) -> None:
        now = self.clock.now()
        for which, kind in enumerate((numbers.INVOICE, numbers.CREDIT_NOTE)):
            following = seller.next_number if kind == numbers.INVOICE else seller.next_credit_note
            named = {key[2]: row for key, row in found.items() if key[:2] == (seller.id, kind)}
            end = max(
                [
                    following,
                    *(number + 1 for number in named),
                    *(each[seller.id][which] for each in filed if seller.id in each),
                ]
            )
            for number in sorted({*range(following, end), *named}):
                row = named.get(number)
                middle = "" if kind == numbers.INVOICE else "CN-"
                label = f"{seller.number_prefix}-{middle}{number:06d}"
                fields = row or {"reason": _UNKNOWN, "label": label}
                if row is not None and kind == numbers.INVOICE:
                    self._of_period(session, row)
                plain = {"seller_id": seller.id, "kind": kind, "number": number, "reserved_at": now}
                if session.get(ReservedNumber, (seller.id, kind, number)) is None:
                    session.add(ReservedNumber(**(fields | plain)))
                self._say(kind, fields)
            if kind == numbers.INVOICE:
                seller.next_number = end
            else:
                seller.next_credit_note = end
        session.flush()

    def _of_period(self, session: Session, row: Row) -> None:
        """The invoice of a tenant and a period is there already, as far as the provider is concerned."""
        tenant_id = row["tenant_id"]
        if row["period_start"] is None and row["issued_at"] is not None:
            row["period_start"] = session.scalar(
                select(BillingPeriod.starts_at)
                .where(
                    BillingPeriod.tenant_id == tenant_id,
                    BillingPeriod.ends_at <= row["issued_at"],
                )
                .order_by(BillingPeriod.ends_at.desc())
                .limit(1)
            )
        account = session.get(BillingAccount, tenant_id)
        if row["period_start"] is None and account is not None:
            account.collection = "manual"
            self.report.problems.append(
                f"{row['label']}: its period is unknown; the payments of {tenant_id} are posted by hand "
                "from now on, until you set its collection again"
            )
        if row.get("external_id") and account is not None:
            done = commands.row(
                self.provider.name,
                tenant_id,
                kind=commands.INVOICE,
                subject_id=row["document_id"],
                key=f"{commands.INVOICE}:{row['document_id']}",
                at=self.clock.now(),
            )
            commands.put(session, done | {"done_at": self.clock.now()})

    def _say(self, kind: str, row: Row) -> None:
        who = f" of {row['tenant_id']}" if row.get("tenant_id") else ""
        if kind == numbers.CREDIT_NOTE:
            self.report.credit_notes.append(f"{row['label']}{who}: {row['reason']}")
        elif row.get("period_start") is None:
            self.report.skipped.append(f"{row['label']}{who}: {row['reason']}")
        else:
            start = f"{row['period_start']:%Y-%m-%d}"
            self.report.invoices.append(f"{row['label']}{who}, period from {start}")

    def _reported(self, session: Session, lost: LostActs) -> None:
        """Counts of usage that the provider has: they would be reported, and priced, once more."""
        rows = [
            commands.row(
                row["provider"],
                row["tenant_id"],
                kind=row["kind"],
                subject_id=row["subject_id"],
                key=row["idempotency_key"],
                at=datetime.fromisoformat(row["created_at"]),
                payload=row["payload"],
            )
            | {"done_at": self.clock.now()}
            for row in lost.of("commands")
            if row["kind"] == commands.USAGE
        ]
        self.report.reported = commands.put_all(session, rows) if rows else 0

    def _end_again(self, session: Session, lost: LostActs) -> None:
        """What was revoked or disabled since the backup is refused again."""
        tables: dict[str, Any] = {"key": ApiKey, "member": Member, "operator": Operator}
        for row in lost.of("ended"):
            found = session.get(tables[row["kind"]], row["id"])
            if found is None:
                continue
            for name in ("revoked_at", "expires_at", "disabled_at"):
                if name not in row:
                    continue
                ends, known = datetime.fromisoformat(row[name]), getattr(found, name)
                if known is None or ends < known:
                    setattr(found, name, ends)
                    self.report.refused.append(f"{row['kind']} {row['id']}: {name} {row[name]}")
        session.flush()
        if self.report.refused:
            epochs.advance(session)

    def _top_ups(self, snapshot: ProviderSnapshot) -> None:
        """Payments of a wallet that the provider took and the database does not know."""
        for state in snapshot.payments.values():
            if state.payment_id and state.status is not Status.FAILED and state.origin.tenant_id:
                try:
                    with self.database.transaction() as session:
                        self._adopt(session, state)
                except TollhouseError as error:
                    self.report.problems.append(f"{state.external_id}: {error}")

    def _adopt(self, session: Session, state: PaymentState) -> None:
        tenant_id, now = state.origin.tenant_id, self.clock.now()
        if session.get(Payment, state.payment_id) is not None:
            return
        if session.get(Tenant, tenant_id) is None:
            self.report.problems.append(
                f"{state.external_id}: the payment is of {tenant_id}, whom the database does not know"
            )
            return
        made = settlement.begin_payment(
            session,
            tenant_id=tenant_id,
            invoice_id=None,
            amount_minor=state.amount_minor,
            currency=state.currency,
            provider=self.provider.name,
            reference=f"{top_ups.references_of(tenant_id)}{state.external_id}",
            at=state.at or now,
            external_id=state.external_id,
            payment_id=state.payment_id,
        )
        posting.payment(session, self.provider.name, state, now)
        self.report.top_ups.append(
            f"{tenant_id}: {made.amount_minor} minor units {made.currency}, {state.external_id}"
        )

    def _list_lost(self, session: Session, lost: LostActs) -> None:
        """What nobody but the customer and the operator can bring back."""
        for row in lost.of("payments"):
            there = session.scalar(
                select(func.count())
                .select_from(LedgerTransaction)
                .where(LedgerTransaction.reference == row["posted"])
            )
            external = row.get("external_id")
            adopted = external and session.scalar(
                select(Payment.id).where(Payment.external_id == external)
            )
            if not there and not adopted:
                amount = f", {row['amount_minor']} {row['currency']}" if "id" in row else ""
                self.report.lost_payments.append(f"{row['tenant_id']}: {row['posted']}{amount}")
        for row in sorted(lost.of("changes"), key=lambda each: str(each["at"])):
            who = row["tenant_id"] or "operator"
            self.report.lost_changes.append(
                f"{row['at']} {who}: {row['action']} {row['target']} by {row['actor']}"
            )

    def _finish(self, lost: LostActs, filed: list[marks.FiledMark]) -> None:
        now = self.clock.now()
        with self.database.transaction() as session:
            last = marks.latest(session)
            own = last.position if last is not None else 0
            highest = max([own, *(each.position for each in filed), *lost.positions])
            epoch = max([last.epoch if last is not None else 0, *(each.epoch for each in filed)])
            found = restores.open_recovery(session)
            if found is None:
                found = Recovery(found_at=now, reason="asked for by an operator")
                session.add(found)
            found.finished_at, found.report = now, self.report.as_json()
            mark = marks.start_epoch(session, epoch + 1, highest + 1, now)
        marks.file_mark(self.settings, mark)


@dataclass(frozen=True, slots=True)
class _Known:
    """Documents that the database has."""

    invoices: set[str]
    notes: set[str]

    @classmethod
    def read(cls, session: Session) -> "_Known":
        final = select(Invoice.id).where(Invoice.number.is_not(None))
        return cls(set(session.scalars(final)), set(session.scalars(select(CreditNote.id))))

    def has(self, row: Row) -> bool:
        return row["document_id"] in (
            self.invoices if row["kind"] == numbers.INVOICE else self.notes
        )


def _of_acts(lost: LostActs) -> Iterator[Row]:
    for each in lost.of("invoices"):
        yield {
            "kind": numbers.INVOICE,
            "seller_id": each["seller_id"],
            "number": each["number"],
            "label": each["label"],
            "tenant_id": each["tenant_id"],
            "document_id": each["id"],
            "period_start": datetime.fromisoformat(each["period_start"]),
            "currency": each["currency"],
            "due_minor": each["due_minor"],
            "issued_at": datetime.fromisoformat(each["final_at"]) if each["final_at"] else None,
            "reason": _NUMBERED,
        }
    for each in lost.of("credit_notes"):
        gross = each["net_minor"] + each["tax_minor"]
        yield {
            "kind": numbers.CREDIT_NOTE,
            "seller_id": each["seller_id"],
            "number": each["number"],
            "label": each["label"],
            "tenant_id": each["tenant_id"],
            "document_id": each["id"],
            "currency": each["currency"],
            "due_minor": gross,
            "reason": f"Issued on {each['invoice']} over {gross} minor units before the database was "
            "restored.",
        }


def _of_provider(sellers: Iterable[Seller], snapshot: ProviderSnapshot) -> Iterator[Row]:
    """Invoices at the provider, which no mark may name: the files of the marks may be lost, too."""
    prefixes = {each.number_prefix: each.id for each in sellers}
    for state in snapshot.invoices.values():
        prefix, _, digits = state.origin.label.rpartition("-")
        if prefix in prefixes and digits.isascii() and digits.isdecimal():
            yield _of_state(state, prefixes[prefix], int(digits))


def _of_state(state: InvoiceState, seller_id: str, number: int) -> Row:
    return {
        "kind": numbers.INVOICE,
        "seller_id": seller_id,
        "number": number,
        "label": state.origin.label,
        "tenant_id": state.origin.tenant_id,
        "document_id": state.invoice_id,
        "external_id": state.external_id,
        "period_start": state.origin.period_start,
        "currency": state.currency,
        "due_minor": state.total_minor,
        "issued_at": state.at,
        "reason": _NUMBERED,
    }
