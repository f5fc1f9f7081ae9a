"""Builds the invoices of many periods in one transaction, with a fixed number of statements."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import lock_accounts
from billing.accounts.tables import BillingAccount, BillingPeriod, Seller
from billing.invoicing import (
    child_invoices,
    invoice_lines,
    metered,
    plan_lines,
    promoted_fees,
    sellers,
)
from billing.invoicing import reserved_numbers as numbers
from billing.invoicing.child_invoices import Organisations
from billing.invoicing.invoice_inputs import InvoiceInputs, last_moment, read_inputs
from billing.invoicing.invoice_totals import (
    Net,
    Totals,
    drift_lines,
    net_of,
    over_drawn,
    owed_of,
    supplies_of,
    totals_of,
)
from billing.invoicing.tables import DRAFT, FINAL, PAID, Invoice, InvoiceLine, ReservedNumber
from billing.ledger import credits, expiry
from billing.ledger.credits import Draw
from billing.ledger.tables import CreditGrant
from billing.restores import restores
from billing.subscriptions.subscriptions import plan_at
from billing.subscriptions.tables import Plan
from billing.taxes import tax_exemptions
from billing.taxes.taxes import Buyer, Certificate, Tax, TaxRequest, TaxService
from core.ids import INVOICE, derived_id
from core.money import units_of_minor
from core.tenants.models import Project, Tenant

GRACE_HOURS = 24  # default without a plan
TERMS_DAYS = 14  # default without a plan
_LATER = ("minor", "unit_price", "calculation")  # written under another name, or in `details`
_LINE = tuple(each.name for each in fields(invoice_lines.Line) if each.name not in _LATER)


@dataclass(frozen=True, slots=True)
class InvoiceDraft:
    """An invoice with its computed lines, taxes, totals and credit draws."""

    invoice: Invoice
    computed_lines: list[invoice_lines.Line]
    tax_items: list[Tax]
    totals: Totals
    draws: list[Draw] = field(default_factory=list)
    back: tuple[int, int] = (0, 0)  # picounits of promotional and prepaid credit that return


@dataclass(frozen=True, slots=True)
class InvoiceBuilder:
    """Periods of several tenants and their inputs; the tenants stay locked until commit."""

    session: Session
    now: datetime
    periods: list[BillingPeriod]
    accounts: dict[str, BillingAccount]
    inputs: InvoiceInputs
    taxes: TaxService
    seller_regions: dict[str, str]  # by seller id
    certificates: dict[str, tuple[Certificate, ...]]  # by tenant id
    organisations: Organisations
    reserved: numbers.Reserved
    metered: metered.Metered
    # Picounits by grant that drafts of earlier periods show as used, although they are not drawn yet.
    shown_credit: dict[str, int] = field(default_factory=dict)

    def plan_of(self, period: BillingPeriod) -> Plan | None:
        """The plan at the last moment of the period."""
        return plan_at(self.inputs.subscriptions.get(period.tenant_id, ()), last_moment(period))

    def final_from(self, period: BillingPeriod) -> datetime:
        """The end of the grace period for late events, when the invoice may become final."""
        plan = self.plan_of(period)
        return period.ends_at + timedelta(hours=plan.grace_hours if plan else GRACE_HOURS)

    def draft(self, period: BillingPeriod, *, closing: bool) -> InvoiceDraft | None:
        """The period's invoice as of now; None if it would be empty. Credit pays for the part that
        rating has not paid from it; `closing` draws that credit, and before, its figures are shown.
        """
        account = self.accounts[period.tenant_id]
        currency = account.currency
        invoice = self.inputs.invoices.get(period.id)
        computed_lines = plan_lines.build(self.inputs, period, account)
        taken_off, compared = metered.take_off(self.metered, computed_lines, period, currency)
        computed_lines += taken_off
        computed_lines += self.organisations.passed.get(period.id, [])
        link = self.organisations.links.get(period.tenant_id)
        computed_lines += child_invoices.markup_lines(link, computed_lines, period, currency)
        reserved = (period.tenant_id, period.starts_at) in self.reserved
        if not computed_lines and invoice is None and not reserved:
            return None
        if invoice is None:
            invoice = self._new(account, period)
        invoice.metered = compared
        promo, prepaid = (
            self.inputs.used.get((period.id, kind), 0) for kind in (credits.PROMO, credits.PREPAID)
        )
        grants = self._grants(period)
        if not closing:  # drawing lowers what remains: of copies that are never stored
            grants = [self._undrawn(each) for each in grants]
        owed = owed_of(computed_lines) - promo - prepaid
        draws = credits.draw(grants, max(0, owed))
        promo += sum(each.units for each in draws if each.kind == credits.PROMO)
        prepaid += sum(each.units for each in draws if each.kind == credits.PREPAID)
        back = over_drawn(computed_lines, promo, prepaid)
        promo, prepaid = promo - back[0], prepaid - back[1]
        promo -= sum(promoted_fees.of_lines(computed_lines).values())
        bounds = period.starts_at, period.ends_at
        computed_lines += drift_lines(net_of(computed_lines, promo, prepaid, currency), bounds)
        net = net_of(computed_lines, promo, prepaid, currency)
        moved = child_invoices.transfer_lines(link, net, period)
        computed_lines += moved
        net = net_of(computed_lines, promo, prepaid, currency)
        tax_items: list[Tax] = []
        if net.taxable_minor or not moved:  # what the parent pays for is taxed on its invoice
            tax_items = self._taxes(account, computed_lines, net)
        tax_minor = sum(tax.amount_minor for tax in tax_items)
        tax_units = units_of_minor(max(0, tax_minor), currency)
        tax_draws = credits.draw_whole(grants, tax_units, credits.PREPAID)
        totals = totals_of(net, tax_items, tax_minor if tax_draws else 0)
        if closing:
            return InvoiceDraft(invoice, computed_lines, tax_items, totals, draws + tax_draws, back)
        for each in draws + tax_draws:
            self.shown_credit[each.grant_id] = self.shown_credit.get(each.grant_id, 0) + each.units
        return InvoiceDraft(invoice, computed_lines, tax_items, totals)

    def _taxes(
        self, account: BillingAccount, lines: list[invoice_lines.Line], net: Net
    ) -> list[Tax]:
        return self.taxes.taxes(
            TaxRequest(
                account.currency,
                self.seller_regions.get(account.seller_id, ""),
                self._buyer(account),
                supplies_of(lines, net.promo_minor, self.now),
            )
        )

    def _undrawn(self, grant: CreditGrant) -> CreditGrant:
        """A copy with what earlier drafts leave of it."""
        left = grant.remaining - self.shown_credit.get(grant.id, 0)
        return CreditGrant(id=grant.id, kind=grant.kind, remaining=left)

    def _buyer(self, account: BillingAccount) -> Buyer:
        return Buyer(
            account.tax_region,
            account.postal_code,
            account.tax_id,
            account.tax_exempt,
            self.certificates.get(account.tenant_id, ()),
        )

    def revive_credit(self, periods: Sequence[BillingPeriod]) -> None:
        """Bring back credit that has expired since these periods ended: it pays for their fees."""
        ended = {period.tenant_id: last_moment(period) for period in periods}
        first = min(ended.values(), default=self.now)
        found = expiry.expired_since(self.session, ended, first, self.now)
        expired = {
            tenant_id: [each for each in grants if _lasts(each, ended[tenant_id])]
            for tenant_id, grants in found.items()
        }
        if any(expired.values()):
            expiry.revive(self.session, expired, self.now)
            self.inputs.grants |= credits.open_grants(self.session, expired, first)

    def _grants(self, period: BillingPeriod) -> list[CreditGrant]:
        """Grants that pay for the period: those that lasted until its end."""
        grants = self.inputs.grants.get(period.tenant_id, [])
        return [each for each in grants if _lasts(each, last_moment(period))]

    def write(self, drafts: Sequence[InvoiceDraft]) -> None:
        """Store totals and lines of the drafts, replacing earlier lines."""
        for each in drafts:
            _put_figures(each.invoice, each.totals)
        self.session.flush()
        for each in drafts:
            link = self.organisations.links.get(each.invoice.tenant_id)
            if link is not None:
                child_invoices.keep(self.session, link, each.invoice, each.computed_lines)
        known = [
            each.invoice.id for each in drafts if each.invoice.period_id in self.inputs.invoices
        ]
        if known:
            self.session.execute(delete(InvoiceLine).where(InvoiceLine.invoice_id.in_(known)))
        rows = [row for each in drafts for row in _rows(each)]
        if rows:
            self.session.execute(insert(InvoiceLine), rows)

    def number(self, drafts: Sequence[InvoiceDraft]) -> None:
        """Assign the sellers' next numbers. Their rows stay locked until commit, so numbers have
        no gap and no duplicate.
        """
        if not drafts:
            return
        restores.require_current(self.session)
        rows = {
            row.id: row
            for row in self.session.scalars(
                select(Seller)
                .where(Seller.id.in_({each.invoice.seller_id for each in drafts}))
                .order_by(Seller.id)
                .with_for_update()
                .execution_options(populate_existing=True)
            )
        }
        periods = {period.id: period for period in self.periods}
        names = _names(self.session, {each.invoice.tenant_id for each in drafts})
        for each in drafts:
            plan = self.plan_of(periods[each.invoice.period_id])
            account = self.accounts[each.invoice.tenant_id]
            terms = account.payment_terms_days
            if terms is None:
                terms = plan.payment_terms_days if plan else TERMS_DAYS
            seller = rows[each.invoice.seller_id]
            before = self.issued_before(each.invoice)
            _make_final(each.invoice, seller, account, self.now, terms)
            each.invoice.billed_to |= names.of(each)
            if before is not None and before.seller_id == seller.id:
                _number_again(each.invoice, before, self.now)
            else:
                _number(each.invoice, seller)
        self.session.flush()

    def issued_before(self, invoice: Invoice) -> ReservedNumber | None:
        """The invoice of the same tenant and period that a restore lost."""
        return self.reserved.get((invoice.tenant_id, invoice.period_start))

    def _new(self, account: BillingAccount, period: BillingPeriod) -> Invoice:
        known = self.reserved.get((period.tenant_id, period.starts_at))
        own_id = derived_id(
            INVOICE, period.tenant_id, period.starts_at.isoformat(), at=period.starts_at
        )
        invoice = Invoice(
            id=(known.document_id if known else "") or own_id,
            tenant_id=account.tenant_id,
            seller_id=account.seller_id,
            period_id=period.id,
            status=DRAFT,
            currency=account.currency,
            period_start=period.starts_at,
            period_end=period.ends_at,
            timezone=account.timezone,
            drafted_at=self.now,
        )
        self.session.add(invoice)
        return invoice


def open_builder(
    session: Session, period_ids: Sequence[str], now: datetime, taxes: TaxService
) -> InvoiceBuilder:
    """Lock the tenants of the periods and read the inputs of their invoices."""
    wanted = select(BillingPeriod).where(BillingPeriod.id.in_(period_ids))
    tenants = set(session.scalars(wanted.with_only_columns(BillingPeriod.tenant_id)))
    accounts = lock_accounts(session, tenants)
    # Read after locking: no other transaction can close these periods now.
    ordered = wanted.order_by(BillingPeriod.tenant_id, BillingPeriod.starts_at)
    periods = list(session.scalars(ordered.execution_options(populate_existing=True)))
    regions = session.execute(
        select(Seller.id, Seller.tax_region).where(
            Seller.id.in_({account.seller_id for account in accounts.values()})
        )
    )
    currencies = {account.tenant_id: account.currency for account in accounts.values()}
    return InvoiceBuilder(
        session,
        now,
        periods,
        accounts,
        read_inputs(session, periods, now),
        taxes,
        {row[0]: row[1] for row in regions},
        tax_exemptions.certificates(session, tenants),
        child_invoices.read_organisations(session, periods, currencies),
        numbers.of_periods(session, periods),
        metered.read(session, periods),
    )


def _lasts(grant: CreditGrant, at: datetime) -> bool:
    return grant.expires_at is None or grant.expires_at > at


def _put_figures(invoice: Invoice, totals: Totals) -> None:
    invoice.exact = totals.net.exact
    invoice.subtotal_minor = totals.net.subtotal_minor
    invoice.promo_minor = totals.net.promo_minor
    invoice.tax_minor = totals.tax_minor
    invoice.total_minor = totals.total_minor
    invoice.prepaid_minor = totals.prepaid_minor
    invoice.due_minor = totals.due_minor


def _rows(draft: InvoiceDraft) -> list[dict[str, Any]]:
    invoice = draft.invoice
    written = [_row(line) for line in draft.computed_lines] + [
        _tax_row(invoice, t) for t in draft.tax_items
    ]
    return [
        {**row, "invoice_id": invoice.id, "position": position}
        for position, row in enumerate(written, 1)
    ]


def _row(line: invoice_lines.Line) -> dict[str, Any]:
    row = {name: getattr(line, name) for name in _LINE}
    row["amount_minor"] = line.minor
    shown = {"unit_price": line.unit_price, "calculation": line.calculation}
    row["details"] = line.details | {name: text for name, text in shown.items() if text}
    return row


def _tax_row(invoice: Invoice, tax: Tax) -> dict[str, Any]:
    line = invoice_lines.Line(
        "tax",
        tax.description,
        units_of_minor(tax.amount_minor, invoice.currency),
        tax.amount_minor,
        invoice.period_start,
        invoice.period_end,
        details={
            "rate_ppm": tax.rate_ppm,
            "taxable_minor": tax.taxable_minor,
            "treatment": tax.treatment.value,
        },
    )
    return _row(line)


def _make_final(
    invoice: Invoice, seller: Seller, account: BillingAccount, now: datetime, terms_days: int
) -> None:
    invoice.issued_by = sellers.issuer(seller)
    invoice.billed_to = {
        "name": account.legal_name,
        "address": account.address,
        "email": account.email,
        "tax_id": account.tax_id,
        "tax_region": account.tax_region,
        "tax_exempt": account.tax_exempt,
    }
    invoice.final_at, invoice.due_at = now, now + timedelta(days=terms_days)
    invoice.status = FINAL
    if invoice.due_minor == 0:
        invoice.status, invoice.settled_at = PAID, now


@dataclass(frozen=True, slots=True)
class _Names:
    tenants: dict[str, str]
    projects: dict[str, str]

    def of(self, draft: InvoiceDraft) -> dict[str, Any]:
        """What exports go on to call the organisation and its projects, whatever they are named later."""
        used = {line.project_id for line in draft.computed_lines} & self.projects.keys()
        shown = self.tenants.get(draft.invoice.tenant_id, "")
        return {"account": shown, "projects": {each: self.projects[each] for each in sorted(used)}}


def _names(session: Session, tenant_ids: set[str]) -> _Names:
    shown = select(Tenant.id, Tenant.display_name).where(Tenant.id.in_(tenant_ids))
    projects = select(Project.id, Project.name).where(Project.tenant_id.in_(tenant_ids))
    return _Names(
        {row[0]: row[1] for row in session.execute(shown)},
        {row[0]: row[1] for row in session.execute(projects)},
    )


def _number(invoice: Invoice, seller: Seller) -> None:
    invoice.number = seller.next_number
    invoice.label = f"{seller.number_prefix}-{seller.next_number:06d}"
    seller.next_number += 1


def _number_again(invoice: Invoice, before: ReservedNumber, now: datetime) -> None:
    """With the number and the dates that the customer knows."""
    invoice.number, invoice.label = before.number, before.label
    invoice.external_id = before.external_id
    if before.issued_at is not None and invoice.due_at is not None:
        invoice.due_at += before.issued_at - now
        invoice.final_at = before.issued_at
    before.used_at = now
