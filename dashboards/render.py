"""Templates to pages: one Jinja environment, its filters, and the headers that every page carries."""

from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from core.money import decimal_of, format_minor, round_to_minor
from dashboards import charts
from dashboards.navigation import sections_for
from dashboards.scales import grouped, short
from dashboards.viewer import House, Viewer

HERE = Path(__file__).parent


@cache
def environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "money": money,
        "exact": exact,
        "minor": minor,
        "whole": grouped,
        "short": short,
        "moment": moment,
        "day": day,
        "share": share,
    }
    made.globals |= {"patterns": Markup(charts.PATTERNS), "meter": _safe(charts.meter)}
    return made


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    viewer: Viewer | None = getattr(request.state, "viewer", None)
    house: House = request.app.state.house
    text = (
        environment()
        .get_template(template)
        .render(
            viewer=viewer,
            sections=sections_for(house, viewer) if viewer else [],
            path=request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
            root=request.scope.get("root_path", ""),
            query=request.query_params,
            now=house.clock.now(),
            notice=request.query_params.get("notice", ""),
            **values,
        )
    )
    return HTMLResponse(text, status)


def svg(text: str) -> Markup:
    """Text that `charts` has escaped already."""
    return Markup(text)


def _safe(draw: Any) -> Any:
    return lambda *arguments: Markup(draw(*arguments))


def money(units: int, currency: str) -> str:
    """To the minor unit, for tiles and tables; the exact amount stands in the title and the CSV."""
    rounded, _left = round_to_minor(units, currency)
    return f"{_grouped_decimal(format_minor(rounded, currency))} {currency}"


def exact(units: int) -> str:
    return decimal_of(units)


def minor(amount: int, currency: str) -> str:
    return f"{_grouped_decimal(format_minor(amount, currency))} {currency}"


def moment(value: datetime | None) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S") if value else "–"


def day(value: datetime | None) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d") if value else "–"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _grouped_decimal(text: str) -> str:
    whole, point, fraction = text.partition(".")
    return grouped(int(whole)) + point + fraction if whole not in ("-0",) else text
