"""The seller's profile: what invoices state about their issuer, and how they are numbered.

A final invoice keeps what it stated; only the logo is always the present one.
"""

import re
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_seller
from billing.accounts.tables import Seller
from billing.accounts.tax_ids import check_region, check_tax_id
from billing.invoicing.tables import Invoice
from core.errors import BadRequest, Conflict

STATED = ("name", "address", "tax_id", "bank_details", "footer")  # on invoices
TEXTS = {"name": 200, "address": 2000, "tax_id": 80, "bank_details": 1000, "footer": 1000}
MAX_LOGO = 2**18  # bytes
_PREFIX = re.compile(r"[A-Za-z0-9-]{1,20}")
_LOGOS = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


def change(session: Session, changes: Mapping[str, Any]) -> Seller:
    """Set the given fields. Raises BadRequest for a value that invoices could not state."""
    seller = ensure_seller(session)
    session.refresh(seller, with_for_update=True)
    for name in TEXTS.keys() & changes.keys():
        setattr(seller, name, _text(name, str(changes[name])))
    if "tax_region" in changes:
        region = str(changes["tax_region"])
        seller.tax_region = check_region(region) if region.strip() else ""
    if {"tax_region", "tax_id"} & changes.keys():
        seller.tax_id = check_tax_id(seller.tax_id, seller.tax_region)
    if "number_prefix" in changes:
        seller.number_prefix = _prefix(str(changes["number_prefix"]))
    if "next_number" in changes:
        _start_numbers(session, seller, changes["next_number"])
    if "logo" in changes:
        seller.logo = changes["logo"] or None
        if seller.logo is not None:
            logo_type(seller.logo)
    session.flush()
    return seller


def describe(seller: Seller) -> dict[str, Any]:
    names = ("id", *STATED, "tax_region", "number_prefix", "next_number")
    return {name: getattr(seller, name) for name in names} | {
        "next_label": f"{seller.number_prefix}-{seller.next_number:06d}",
        "logo": logo_type(seller.logo) if seller.logo else None,
    }


def issuer(seller: Seller) -> dict[str, str]:
    """What an invoice states, which is kept with it when it becomes final."""
    return {name: str(getattr(seller, name)) for name in STATED}


def logo_uri(seller: Seller) -> str:
    """For a page without external resources; empty without a logo."""
    if not seller.logo:
        return ""
    return f"data:{logo_type(seller.logo)};base64,{b64encode(seller.logo).decode()}"


def logo_type(content: bytes) -> str:
    kind = next((kind for magic, kind in _LOGOS.items() if content.startswith(magic)), "")
    if not kind or len(content) > MAX_LOGO:
        raise BadRequest(
            f"The logo has {len(content)} bytes and begins with {content[:4]!r}.",
            next_step=f"Give a PNG or JPEG file of at most {MAX_LOGO // 1024} KiB.",
            param="logo",
        )
    return kind


def _text(name: str, value: str) -> str:
    text = value.strip()
    if len(text) > TEXTS[name] or (name == "name" and not text):
        raise BadRequest(
            f"{name} has {len(text)} characters; it takes "
            f"{'1' if name == 'name' else '0'} to {TEXTS[name]}.",
            next_step="Shorten it." if text else "Give the name of the company.",
            param=name,
        )
    return text


def _prefix(value: str) -> str:
    if not _PREFIX.fullmatch(value):
        raise BadRequest(
            f"number_prefix is {value[:40]!r}; it takes 1 to 20 letters, digits and hyphens.",
            next_step="Use a prefix such as TH or 2026-A.",
            param="number_prefix",
        )
    return value


def _start_numbers(session: Session, seller: Seller, value: Any) -> None:
    """Numbers run without a gap, so that their start is chosen before the first one."""
    if not isinstance(value, int) or not 0 < value < 10**12:
        raise BadRequest(
            f"next_number is {value!r}; it must be a positive whole number.", param="next_number"
        )
    if value == seller.next_number:
        return
    query = select(func.max(Invoice.number)).where(Invoice.seller_id == seller.id)
    last = session.scalar(query)
    if last is not None:
        raise Conflict(
            f"next_number cannot become {value}: invoice numbers run without a gap, and the last one "
            f"is {last}.",
            next_step="Choose another number_prefix to tell new invoices apart.",
            param="next_number",
        )
    seller.next_number = value
