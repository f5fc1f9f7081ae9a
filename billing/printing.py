"""Printable invoices: one HTML template, rendered to PDF by WeasyPrint."""

from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from billing.periods import zone_of
from core.errors import MissingExtra
from core.extras import imports_of


def as_html(document: dict[str, Any]) -> str:
    """A self-contained page: no scripts, no external resources."""
    return _template().render(invoice=document, day=_day_in(document["timezone"]))


def as_pdf(document: dict[str, Any]) -> bytes:
    # Imported here: it is heavy, loads system libraries, and few processes print.
    with imports_of("pdf", "An invoice as PDF"):
        try:
            from weasyprint import HTML
        except OSError as error:
            raise MissingExtra(
                f"WeasyPrint cannot load a system library: {error}".partition("\n")[0],
                next_step="Install Pango (Debian: libpango-1.0-0 and libpangoft2-1.0-0).",
            ) from None

    return bytes(HTML(string=as_html(document), base_url=".").write_pdf())


def _day_in(timezone: str) -> Any:
    zone = zone_of(timezone)

    def _day(moment: str | None) -> str:
        if not moment:
            return "–"
        return f"{datetime.fromisoformat(moment).astimezone(zone):%Y-%m-%d}"

    return _day


@lru_cache(maxsize=1)
def _template() -> Template:
    loader = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("invoice.html")
