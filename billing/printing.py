"""Printable invoices: one HTML template, rendered to PDF by WeasyPrint."""

from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from billing.periods import zone_of


def as_html(document: dict[str, Any]) -> str:
    """A self-contained page: no scripts, no external resources."""
    return _template().render(invoice=document, day=_day_in(document["timezone"]))


def as_pdf(document: dict[str, Any]) -> bytes:
    from weasyprint import HTML  # slow to import, and loads system libraries

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
