"""Templates to pages: one Jinja environment, its filters, and the headers that every page carries."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from dashboards import cells, charts
from dashboards.formats import day, exact, feeling, marked, minor, moment, money, share
from dashboards.navigation import sections_for
from dashboards.scales import grouped, short
from dashboards.viewer import House, Viewer

HERE = Path(__file__).parent
# What a change says on the page that it leads back to: a word in the URL, never text from it.
NOTICES = {
    "key-revoked": "The key is revoked.",
    "member-added": "The member is added.",
    "member-changed": "The member is changed, and signed out everywhere.",
    "member-removed": "The member is removed, and signed out everywhere.",
    "adapter-added": "The adapter is valid and registered. Its name works in `model` at once.",
    "adapter-removed": "The adapter is removed. Requests that name it are refused from now on.",
    "limit-set": "The limit is in force.",
    "limit-removed": "The limit is removed; the plan's holds again.",
    "budget-set": "The budget is in force.",
    "budget-ended": "The budget has ended.",
    "policy-put": "The policy is in force.",
    "policy-retired": "The policy is out of force; the next level's holds.",
    "appeal-opened": "The appeal is open. Its answer appears here.",
    "appeal-decided": "The appeal is decided.",
    "key-freed": "The key works again; earlier strikes no longer count.",
    "tenant-made": "The tenant is made. Give it a first key with `tollhouse key new`.",
    "tenant-shown": "The pages below are this tenant's until another is chosen.",
    "tenant-changed": "The tenant is changed.",
    "price-saved": "The price was tried on samples and saved.",
    "replayed": "The tasks were played again.",
    "resent": "The message goes out again.",
    "endpoint-removed": "The endpoint is removed. Nothing more is sent to it.",
    "test-sent": "A test is on its way; the list below says how it went.",
    "schedule-made": "The schedule is set. Its first file comes when the current span ends.",
    "schedule-pause": "The schedule is paused.",
    "schedule-resume": "The schedule goes on with the current span.",
    "schedule-end": "The schedule is deleted. Files that it made stay.",
}


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
        "feeling": feeling,
        "marked": marked,
    }
    made.globals |= {"lines": cells.lines}
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
            notice=NOTICES.get(request.query_params.get("notice", ""), ""),
            **values,
        )
    )
    return HTMLResponse(text, status)


def svg(text: str) -> Markup:
    """Text that `charts` has escaped already."""
    return Markup(text)


def _safe(draw: Any) -> Any:
    return lambda *arguments: Markup(draw(*arguments))
