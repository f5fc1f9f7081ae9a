"""Checks tax ids by format and checksum (python-stdnum); says whose country an EU id is of."""

import re
from importlib import import_module
from typing import Any

from stdnum import get_cc_module
from stdnum.eu import vat
from stdnum.exceptions import ValidationError

from core.errors import BadRequest

EU = frozenset(
    (
        *("AT", "BE", "BG", "CY", "CZ", "DE", "DK", "EE", "ES", "FI", "FR", "GR", "HR", "HU"),
        *("IE", "IT", "LT", "LU", "LV", "MT", "NL", "PL", "PT", "RO", "SE", "SI", "SK"),
    )
)
_EU_PREFIX = {"GR": "EL"}  # where the prefix is not the country's code
_OTHERS = {"US": "stdnum.us.ein"}  # business numbers that are not called VAT
_REGION = re.compile(r"[A-Z]{2}(-[A-Z0-9]{1,3})?")


def check_region(region: str) -> str:
    """A country (ISO 3166-1) or a part of one (ISO 3166-2), in capitals. Raises BadRequest."""
    found = region.strip().upper()
    if not _REGION.fullmatch(found):
        raise BadRequest(
            f"tax_region is {region!r}; it must be a country or a part of one.",
            next_step="Use codes such as DE or US-NY (ISO 3166).",
            param="tax_region",
        )
    return found


def country_of(region: str) -> str:
    return region[:2]


def check_tax_id(tax_id: str, region: str) -> str:
    """The id without separators, with its prefix in the EU. Raises BadRequest if it is not valid in
    the region's country. Ids of countries without a known format are kept as they are."""
    if not tax_id.strip():
        return ""
    country = country_of(region)
    if not country:
        raise BadRequest(
            f"tax_id is {tax_id!r}, but the account has no tax_region.",
            next_step="Set tax_region in the same call.",
            param="tax_id",
        )
    try:
        if country in EU:
            return _eu_id(tax_id, country)
        module = _module(country)
        return str(module.validate(tax_id)) if module else tax_id.strip()
    except ValidationError as error:
        raise BadRequest(
            f"tax_id is {tax_id!r}, which is not valid in {country}: {error}",
            next_step="Copy it from the customer's registration, or leave it empty.",
            param="tax_id",
        ) from None


def eu_country(tax_id: str) -> str | None:
    """The country of a valid EU VAT id, None for any other."""
    prefix = tax_id[:2].upper()
    country = next((c for c, p in _EU_PREFIX.items() if p == prefix), prefix)
    return country if country in EU and vat.is_valid(tax_id) else None


def _eu_id(tax_id: str, country: str) -> str:
    prefix = _EU_PREFIX.get(country, country)
    text = re.sub(r"[\s.\-/]", "", tax_id).upper()
    if not text.startswith((prefix, country)):
        text = prefix + text
    return str(vat.validate(prefix + text[2:]))


def _module(country: str) -> Any:
    if country in _OTHERS:
        return import_module(_OTHERS[country])
    return get_cc_module(country.lower(), "vat")
