"""The stored price book: versions are validated, saved, and superseded but never changed."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.pricing import price_terms
from billing.pricing.pricing import ANY, PPM, Component, PriceBook, PriceVersion, Rate
from billing.pricing.tables import PriceVersionRow
from core.clock import Clock
from core.errors import BadRequest, Conflict, NotFound
from core.ids import PRICE, new_id
from core.money import units_of
from core.tenants.models import Tenant

# Prices of a model until one is set: US dollars, per million tokens for token components.
DEFAULT_TERMS: dict[str, Any] = {
    "input": "0.15",
    "cached_input": "0.075",
    "output": "0.60",
    "waived": "0",
    "gpu_second": "0.0008",
    "moderation": "0.0001",
}
DEFAULT_NOTE = "default price"
DEFAULT_CURRENCY = "USD"
_EVER = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class PriceDraft:
    """A price to be validated and saved. `written` has the form in `billing.pricing.price_terms`."""

    model: str
    written: dict[str, Any]
    effective_from: datetime
    effective_to: datetime | None = None
    tenant_id: str = ""
    adapter: str = ANY
    currency: str = DEFAULT_CURRENCY
    discount_percent: str = "0"
    note: str = ""
    created_by: str = ""


def load_price_book(session: Session) -> PriceBook:
    newest_first = PriceVersionRow.effective_from.desc()
    rows = session.scalars(select(PriceVersionRow).order_by(newest_first, PriceVersionRow.id))
    return PriceBook(tuple(version_of(row) for row in rows))


def version_of(row: PriceVersionRow) -> PriceVersion:
    rates, discount_ppm = price_terms.load(row.terms)
    return PriceVersion(
        row.id,
        row.currency,
        rates,
        discount_ppm,
        row.tenant_id,
        row.model,
        row.adapter,
        row.effective_from,
        row.effective_to,
    )


def get_version(session: Session, version_id: str) -> PriceVersion:
    row = session.get(PriceVersionRow, version_id)
    if row is None:
        raise NotFound(
            f"There is no price version {version_id!r}.",
            next_step="List prices with: tollhouse price list",
        )
    return version_of(row)


def validate(
    draft: PriceDraft, kept: Mapping[Component, Rate] = MappingProxyType({})
) -> PriceVersion:
    """The version that the draft would become, with the rates that it keeps of the one before,
    validated on samples; BadRequest if it is invalid."""
    written = price_terms.parse(draft.written) if draft.written or not kept else {}
    return _checked(draft, MappingProxyType({**kept, **written}), _ppm(draft.discount_percent))


def save(
    session: Session,
    clock: Clock,
    draft: PriceDraft,
    kept: Mapping[Component, Rate] = MappingProxyType({}),
) -> PriceVersion:
    """Validate and store. An open version of the same scope and currency ends where this one begins."""
    version = validate(draft, kept)
    _check_currency_of_tenant(session, version)
    _end_predecessor(session, version)
    return _insert(session, clock, version, draft)


def discount(session: Session, clock: Clock, draft: PriceDraft, base: PriceVersion) -> PriceVersion:
    """A negotiated discount for one tenant: the base's rates less the draft's percentage."""
    if not draft.tenant_id:
        raise BadRequest(
            "A discount needs a tenant.", next_step="Name the tenant that negotiated it."
        )
    version = _checked(draft, base.rates, _ppm(draft.discount_percent))
    _check_currency_of_tenant(session, version)
    _end_predecessor(session, version)
    return _insert(session, clock, version, draft)


def ensure_default_prices(session: Session, clock: Clock, model: str) -> PriceVersion:
    """The model's list price in dollars; creates the default one, without a start, if there is none."""
    try:
        return load_price_book(session).pin("", model, None, clock.now(), DEFAULT_CURRENCY)
    except NotFound:
        draft = PriceDraft(model, DEFAULT_TERMS, _EVER, note=DEFAULT_NOTE)
        return save(session, clock, draft)


def ensure_price(
    session: Session, clock: Clock, model: str, written: dict[str, Any], note: str
) -> PriceVersion:
    """The list price from the operator's configuration: saved as a new version if it has changed.
    A price set by hand since then (its note differs) stays in force."""
    row = session.scalars(
        select(PriceVersionRow)
        .where(
            PriceVersionRow.tenant_id == "",
            PriceVersionRow.model == model,
            PriceVersionRow.adapter == ANY,
            PriceVersionRow.currency == DEFAULT_CURRENCY,
            PriceVersionRow.effective_to.is_(None),
        )
        .order_by(PriceVersionRow.effective_from.desc())
    ).first()
    if row is None:
        return save(session, clock, PriceDraft(model, written, _EVER, note=note))
    draft = PriceDraft(model, written, clock.now(), note=note)
    if row.note not in (note, DEFAULT_NOTE) or version_of(row).rates == validate(draft).rates:
        return version_of(row)
    return save(session, clock, draft)


def _checked(
    draft: PriceDraft, rates: MappingProxyType[Component, Rate], discount_ppm: int
) -> PriceVersion:
    if draft.effective_to is not None and draft.effective_to <= draft.effective_from:
        raise BadRequest(
            f"effective_to {draft.effective_to:%Y-%m-%d} is not after effective_from "
            f"{draft.effective_from:%Y-%m-%d}.",
            next_step="Swap the dates.",
        )
    version = PriceVersion(
        new_id(PRICE),
        draft.currency,
        rates,
        discount_ppm,
        draft.tenant_id,
        draft.model,
        draft.adapter or ANY,
        draft.effective_from,
        draft.effective_to,
    )
    price_terms.check(version)
    return version


def _check_currency_of_tenant(session: Session, version: PriceVersion) -> None:
    """A negotiated price in a currency in which the tenant is not billed would never be used."""
    account = session.get(BillingAccount, version.tenant_id) if version.tenant_id else None
    tenant = session.get(Tenant, version.tenant_id) if version.tenant_id else None
    billed = account or tenant
    if billed is not None and billed.currency != version.currency:
        raise BadRequest(
            f"The price is in {version.currency}, but the tenant is billed in {billed.currency}.",
            next_step=f"Write the price in {billed.currency}.",
            param="currency",
            code="price_refused",
        )


def _end_predecessor(session: Session, version: PriceVersion) -> None:
    start, end = version.effective_from, version.effective_to
    assert start is not None
    rows = session.scalars(
        select(PriceVersionRow)
        .where(
            PriceVersionRow.tenant_id == version.tenant_id,
            PriceVersionRow.model == version.model,
            PriceVersionRow.adapter == version.adapter,
            PriceVersionRow.currency == version.currency,
        )
        .with_for_update()
    ).all()
    for row in rows:
        if row.effective_to is None and row.effective_from < start:
            row.effective_to = start
            continue
        ends_before = row.effective_to is not None and row.effective_to <= start
        begins_after = end is not None and row.effective_from >= end
        if not ends_before and not begins_after:
            raise Conflict(
                f"The price overlaps version {row.id}, in force from {row.effective_from:%Y-%m-%d} "
                f"to {_shown(row.effective_to)}.",
                next_step="Start the price after that version ends, or end it before that one starts.",
                code="price_overlap",
            )
    session.flush()


def _insert(
    session: Session, clock: Clock, version: PriceVersion, draft: PriceDraft
) -> PriceVersion:
    row = PriceVersionRow(
        id=version.id,
        tenant_id=version.tenant_id,
        model=version.model,
        adapter=version.adapter,
        currency=version.currency,
        effective_from=version.effective_from,
        effective_to=version.effective_to,
        terms=price_terms.dump(version.rates, version.discount_ppm),
        note=draft.note,
        created_at=clock.now(),
        created_by=draft.created_by,
    )
    session.add(row)
    session.flush()
    return version


def _ppm(percent: str) -> int:
    """Parts per million of a percentage with up to four decimals."""
    units = units_of(percent) * PPM
    if units % (100 * 10**12):
        raise BadRequest(
            f"A discount of {percent}% has more than four decimals.",
            next_step="Round it to four decimals.",
        )
    return units // (100 * 10**12)


def _shown(moment: datetime | None) -> str:
    return "no end date" if moment is None else f"{moment:%Y-%m-%d}"
