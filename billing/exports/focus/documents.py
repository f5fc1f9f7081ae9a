"""The documents whose rows make up a billing period: its invoice, and the credit notes and voids that
were issued while it was open.

A closed period is append-only. What takes something back later is a document of its own, in the period
that is open at that time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import ColumnElement, literal, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from billing.accounts.accounts import Periods
from billing.accounts.tables import BillingAccount, BillingPeriod, Seller
from billing.invoicing.invoice_builder import TERMS_DAYS
from billing.invoicing.tables import DRAFT, VOID, CreditNote, Invoice
from billing.ledger.tables import LedgerTransaction
from core.tenants.models import Tenant
from core.tenants.scope import TenantScope

_LONGEST = timedelta(days=63)  # of two billing periods


class Kind(StrEnum):
    INVOICE = "invoice"
    CREDIT_NOTE = "credit_note"
    VOID = "void"  # takes all of an invoice back
    RESTORED = "restored"  # takes a void back


class Bounds(NamedTuple):
    starts_at: datetime
    ends_at: datetime


@dataclass(frozen=True, slots=True)
class Document:
    """`number` is the InvoiceId of its rows. The amounts are those of `invoice`, times `sign`, or those
    of `note`."""

    kind: Kind
    number: str
    invoice: Invoice
    bounds: Bounds
    issuer: str
    customer: str
    issued_at: datetime | None  # None: a draft
    updated_at: datetime
    note: CreditNote | None = None
    sign: int = 1
    voided: bool = False
    terms_days: int = TERMS_DAYS

    @property
    def corrects(self) -> str | None:
        """The invoice that it corrects."""
        return None if self.kind is Kind.INVOICE else self.invoice.label

    @property
    def is_draft(self) -> bool:
        return self.issued_at is None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a document stands in the order of an export, and what it is read from."""

    bounds: Bounds
    kind: Kind
    invoice_id: str
    note_id: str = ""
    suffix: str = ""  # of the number of a void
    at: datetime | None = None

    @property
    def order(self) -> tuple[datetime, datetime, str, str, str]:
        return *self.bounds, self.invoice_id, self.kind.value, self.note_id + self.suffix


@dataclass(frozen=True, slots=True)
class Window:
    """Billing periods that overlap the time, or only those with exactly these bounds."""

    start: datetime
    end: datetime  # exclusive
    exact: bool = False

    def has(self, bounds: Bounds) -> bool:
        if self.exact:
            return bounds == (self.start, self.end)
        return bounds.ends_at > self.start and bounds.starts_at < self.end


@dataclass(slots=True)
class Calendar:
    """Billing periods of tenants around moments; nothing is created."""

    session: Session
    _known: dict[str, list[Bounds]] = field(default_factory=dict)
    _accounts: dict[str, BillingAccount] = field(default_factory=dict)

    def load(self, tenant_ids: set[str]) -> None:
        row = BillingPeriod
        new = tenant_ids - self._known.keys()
        for tenant_id in new:
            self._known[tenant_id] = []
        columns = select(row.tenant_id, row.starts_at, row.ends_at).where(row.tenant_id.in_(new))
        for tenant_id, start, end in self.session.execute(columns):
            self._known[tenant_id].append(Bounds(start, end))

    def around(self, tenant_id: str, at: datetime) -> Bounds:
        self.load({tenant_id})
        for each in self._known[tenant_id]:
            if each.starts_at <= at < each.ends_at:
                return each
        account = self._accounts.get(tenant_id)
        if account is None:
            account = self._accounts[tenant_id] = self.session.get_one(BillingAccount, tenant_id)
        found = Bounds(*Periods(self.session).bounds(account, at))
        self._known[tenant_id].append(found)
        return found


def places(session: Session, scope: TenantScope | None, window: Window) -> list[Place]:
    """Documents of the billing periods of the window, ordered by period and invoice."""
    calendar = Calendar(session)
    found = [each for each in _invoices(session, scope, window) if window.has(each.bounds)]
    near = (window.start - _LONGEST, window.end + _LONGEST)
    later = [*_notes(session, scope, near), *_voids(session, scope, near)]
    calendar.load({tenant_id for tenant_id, _, _ in later})
    for tenant_id, at, place in later:
        bounds = calendar.around(tenant_id, at)
        if window.has(bounds):
            found.append(
                Place(bounds, place.kind, place.invoice_id, place.note_id, place.suffix, at)
            )
    return sorted(found, key=lambda each: each.order)


def _invoices(session: Session, scope: TenantScope | None, window: Window) -> Iterator[Place]:
    query = select(Invoice.period_start, Invoice.period_end, Invoice.id).where(
        Invoice.period_end > window.start, Invoice.period_start < window.end
    )
    if scope is not None:
        query = query.where(Invoice.tenant_id == scope.tenant_id)
    for start, end, invoice_id in session.execute(query):
        yield Place(Bounds(start, end), Kind.INVOICE, invoice_id)


_Later = tuple[str, datetime, Place]  # tenant, moment, and a place without bounds


def _notes(
    session: Session, scope: TenantScope | None, near: tuple[datetime, datetime]
) -> Iterator[_Later]:
    row = CreditNote
    query = select(row.tenant_id, row.issued_at, row.invoice_id, row.id).where(
        row.issued_at >= near[0], row.issued_at < near[1]
    )
    if scope is not None:
        query = query.where(row.tenant_id == scope.tenant_id)
    for tenant_id, at, invoice_id, note_id in session.execute(query):
        yield tenant_id, at, Place(Bounds(at, at), Kind.CREDIT_NOTE, invoice_id, note_id)


def _voids(
    session: Session, scope: TenantScope | None, near: tuple[datetime, datetime]
) -> Iterator[_Later]:
    """Voids and what took them back, by the ledger. An invoice over nothing has no posting."""
    posted, opposite = LedgerTransaction, aliased(LedgerTransaction)
    # A reversal is found by its reference, which has an index.
    undone = opposite.reference == literal("reverse:") + posted.id
    query = (
        select(posted.tenant_id, posted.reference, posted.at, opposite.at)
        .outerjoin(opposite, undone)
        .where(posted.kind == "void", posted.at < near[1], *_of(scope, posted.tenant_id))
    )
    known = set()
    for tenant_id, reference, at, undone_at in session.execute(query):
        _, invoice_id, number = f"{reference}:1".split(":")[:3]
        suffix = "" if number == "1" else f"-{number}"
        known.add(invoice_id)
        yield tenant_id, at, Place(Bounds(at, at), Kind.VOID, invoice_id, suffix=suffix)
        if undone_at is not None:
            bounds = Bounds(undone_at, undone_at)
            yield tenant_id, undone_at, Place(bounds, Kind.RESTORED, invoice_id, suffix=suffix)
    row = Invoice
    empty = select(row.tenant_id, row.settled_at, row.id).where(
        row.status == VOID, row.settled_at.between(*near), *_of(scope, row.tenant_id)
    )
    for tenant_id, settled_at, invoice_id in session.execute(empty):
        if invoice_id not in known and settled_at is not None:
            bounds = Bounds(settled_at, settled_at)
            yield tenant_id, settled_at, Place(bounds, Kind.VOID, invoice_id)


def _of(scope: TenantScope | None, column: InstrumentedAttribute[str]) -> list[ColumnElement[bool]]:
    return [] if scope is None else [column == scope.tenant_id]


def read(session: Session, some: Sequence[Place]) -> list[Document]:
    """The documents of these places, with the names of seller and customer as the invoice froze them."""
    invoices = {
        row.id: row
        for row in session.scalars(
            select(Invoice).where(Invoice.id.in_({each.invoice_id for each in some}))
        )
    }
    wanted = {each.note_id for each in some if each.note_id}
    notes = {
        row.id: row for row in session.scalars(select(CreditNote).where(CreditNote.id.in_(wanted)))
    }
    names = _Names.read(session, list(invoices.values()))
    return [
        _document(each, invoices[each.invoice_id], notes.get(each.note_id), names)
        for each in some
        if each.invoice_id in invoices
    ]


def _document(place: Place, invoice: Invoice, note: CreditNote | None, names: "_Names") -> Document:
    label = invoice.label or invoice.id
    number, sign = label, 1
    issued_at = None if invoice.status == DRAFT else invoice.final_at
    updated_at = issued_at or invoice.drafted_at
    voided = invoice.status == VOID
    if place.kind is Kind.CREDIT_NOTE:
        assert note is not None
        number, issued_at, updated_at, voided = note.label, note.issued_at, note.issued_at, False
    elif place.kind is not Kind.INVOICE:
        number = f"{label}-{place.kind.value.upper()}{place.suffix}"
        issued_at = updated_at = place.at or updated_at
        sign, voided = -1 if place.kind is Kind.VOID else 1, True
    elif voided:
        updated_at = invoice.settled_at or updated_at
    return Document(
        place.kind,
        number,
        invoice,
        place.bounds,
        names.issuer(invoice),
        names.customer(invoice),
        issued_at,
        updated_at,
        note,
        sign,
        voided,
        names.terms(invoice),
    )


@dataclass(frozen=True, slots=True)
class _Names:
    sellers: dict[str, str]
    tenants: dict[str, str]
    terms_days: dict[str, int | None]

    @classmethod
    def read(cls, session: Session, invoices: list[Invoice]) -> "_Names":
        tenants = {each.tenant_id for each in invoices}
        sellers = select(Seller.id, Seller.name).where(
            Seller.id.in_({each.seller_id for each in invoices})
        )
        shown = select(Tenant.id, Tenant.display_name).where(Tenant.id.in_(tenants))
        account = BillingAccount
        terms = select(account.tenant_id, account.payment_terms_days).where(
            account.tenant_id.in_(tenants)
        )
        return cls(
            {row[0]: row[1] for row in session.execute(sellers)},
            {row[0]: row[1] for row in session.execute(shown)},
            {row[0]: row[1] for row in session.execute(terms)},
        )

    def issuer(self, invoice: Invoice) -> str:
        now = self.sellers.get(invoice.seller_id, invoice.seller_id)
        return str(invoice.issued_by.get("name") or now)

    def customer(self, invoice: Invoice) -> str:
        now = self.tenants.get(invoice.tenant_id, invoice.tenant_id)
        frozen = invoice.billed_to.get("name") or invoice.billed_to.get("account")
        return str(frozen or now)

    def terms(self, invoice: Invoice) -> int:
        if invoice.due_at is not None and invoice.final_at is not None:
            return (invoice.due_at - invoice.final_at).days
        agreed = self.terms_days.get(invoice.tenant_id)
        return TERMS_DAYS if agreed is None else agreed
