"""Rendering of pages: the Jinja environment, its filters, and the variables of every template."""

from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse

from dashboards import cells, charts, once
from dashboards.formats import (
    badge_class,
    day,
    exact,
    markup_code,
    markup_links,
    minor,
    moment,
    money,
    share,
    time_html,
)
from dashboards.navigation import sections_for
from dashboards.scales import grouped, short
from dashboards.theme import THEMES, theme_of
from dashboards.viewer import DashboardDeps, Viewer

HERE = Path(__file__).parent
# Messages after a change. The URL carries only the key, never the text.
NOTICES = {
    "key-made": "The key was created.",
    "card-page": "The provider's page is ready.",
    "key-rotated": "A new key was created. The old one works for another 24 hours.",
    "key-changed": "The key was changed.",
    "key-revoked": "The key was revoked.",
    "project-made": "The project was created.",
    "labels-set": "The labels were set. Requests can name them within a second.",
    "project-archived": "The project was archived. Its keys no longer work.",
    "member-invited": "Give this link to the member. It works once, for seven days.",
    "member-mailed": "A link was mailed to the member. It works once, for seven days.",
    "endpoint-added": "The endpoint was added, and a test message is queued. Messages are signed with "
    "this secret.",
    "member-added": "The member was added.",
    "member-changed": "The member was changed and signed out everywhere.",
    "member-removed": "The member was removed and signed out everywhere.",
    "adapter-added": "The adapter is valid and registered. You can use it in `model` now.",
    "adapter-preloads": "Each engine of its model loads the adapter within seconds.",
    "adapter-removed": "The adapter was removed. Requests that name it are rejected.",
    "prompt-made": "The prompt was created. Requests can name it by its id.",
    "prompt-version": "The version was added and is in use.",
    "prompt-used": "Requests that name no version use this one from now on.",
    "prompt-removed": "The prompt was removed. Requests that name it are refused.",
    "log-set": "A record of each request is sent from now on, signed with this secret.",
    "log-off": "Requests are no longer logged.",
    "cache-set": "Answers are cached from now on.",
    "cache-erased": "The cached answers were erased.",
    "cache-off": "The response cache is off, and its answers were erased.",
    "limit-set": "The limit is in force.",
    "limit-removed": "The limit was removed. The limit of the plan applies again.",
    "budget-set": "The budget is in force.",
    "budget-signed": "The budget is in force. Messages to its webhook are signed with this secret.",
    "budget-ended": "The budget has ended.",
    "policy-put": "The policy is in force.",
    "policy-retired": "The policy was retired. The policy of the next level applies.",
    "appeal-opened": "The appeal is open. The answer will appear here.",
    "appeal-decided": "The appeal was decided.",
    "key-freed": "The key works again. Earlier strikes no longer count.",
    "sign-on-set": "The connection is saved.",
    "sign-on-tested": "The provider answered as it should: the connection is tested.",
    "sign-on-forced": "Members sign in at your provider alone. Their other sessions have ended.",
    "sign-on-removed": "The connection was removed. Members sign in with a password or an invitation.",
    "tenant-made": "The tenant was created.",
    "tenant-shown": "The tenant pages now show this tenant.",
    "tenant-changed": "The tenant was changed.",
    "tenant-erased": "The tenant was erased. Its invoices and the books stay, as the law asks.",
    "act-posted": "It is posted.",
    "act-waits": "It waits for a second operator. Nothing is posted yet.",
    "act-rejected": "The act was rejected. Nothing was posted.",
    "statement-imported": "The statement is imported. Lines that match nothing are unmatched below.",
    "line-changed": "The line was changed.",
    "month-signed": "The month is signed off.",
    "account-saved": "The billing details are saved. Invoices that become final from now on state them.",
    "plan-made": "The billing plan was created.",
    "add-on-made": "The add-on was created.",
    "add-on-set": "The add-on is changed. Its fee is prorated.",
    "tax-set": "The tax rate is in force from its first day.",
    "subscription-changed": "The subscription was changed.",
    "released": "What could be rated was released. The rest is below with its reason.",
    "dropped": "The event was closed without billing it.",
    "seller-saved": "The profile is saved. Invoices that become final from now on state it.",
    "engine-drained": "The engine gets no new requests. Those that run finish.",
    "engine-resumed": "The engine gets requests again.",
    "upstreams-reloaded": "The gateway serves by the file. Requests on removed engines finish there.",
    "engine-price-saved": "The price of engines is saved. Margins use it from its first day on.",
    "rates-saved": "The exchange rates are saved. Reports of their days use them.",
    "invoices-final": "The ended periods are final. Usage that comes late is on the next invoice.",
    "parent-changed": "The parent organisation is changed, for invoices that become final from now on.",
    "price-saved": "The price was tested on sample usage and saved.",
    "audit-done": "The audit has run.",
    "audit-runs": "The audit runs. Reload this page for its report.",
    "replayed": "The tasks were replayed.",
    "resent": "The message is queued again.",
    "endpoint-removed": "The endpoint was removed. No more messages are sent to it.",
    "test-sent": "A test message is queued. The list below shows the result.",
    "schedule-made": "The schedule is active. The first file is written when the current period ends.",
    "schedule-change": "The schedule writes this FOCUS dataset from its next file on.",
    "schedule-pause": "The schedule is paused.",
    "schedule-resume": "The schedule is active again, from the current period on.",
    "schedule-end": "The schedule was deleted. Its files were kept.",
}


@cache
def environment() -> Environment:
    jinja = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {
        "money": money,
        "exact": exact,
        "minor": minor,
        "whole": grouped,
        "short": short,
        "moment": moment,
        "time": time_html,
        "day": day,
        "share": share,
        "badge_class": badge_class,
        "markup_code": markup_code,
        "markup_links": markup_links,
    }
    jinja.globals |= {"lines": cells.lines, "static": _static, "even": even_columns}
    jinja.globals |= {"patterns": Markup(charts.PATTERNS), "meter": _safe(charts.meter)}
    return jinja


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    viewer: Viewer | None = getattr(request.state, "viewer", None)
    deps: DashboardDeps = request.app.state.deps
    secret = once.secret_of(request) if viewer is not None and status == 200 else ""
    text = (
        environment()
        .get_template(template)
        .render(
            viewer=viewer,
            sections=sections_for(deps, viewer) if viewer else {},
            themes=THEMES,
            theme=theme_of(request),
            path=request.url.path.removeprefix(request.scope.get("root_path", "")) or "/",
            search=request.url.query,
            root=request.scope.get("root_path", ""),
            query=request.query_params,
            now=deps.clock.now(),
            secret=secret,
            notice=NOTICES.get(request.query_params.get("notice", ""), ""),
            **values,
        )
    )
    answer = HTMLResponse(text, status)
    if secret:
        once.forget(request, answer)
    return answer


@cache
def _static(name: str) -> str:
    """A file's URL under the root. It changes with the content, so that no browser keeps an old one."""
    digest = sha256((HERE / "static" / name).read_bytes()).hexdigest()
    return f"/static/{name}?v={digest[:8]}"


def even_columns(count: int, most: int) -> int:
    """The most columns with which the last row of tiles lacks at most one."""
    return next((n for n in range(min(count, most), 1, -1) if -count % n <= 1), 1)


def svg(text: str) -> Markup:
    """Marks SVG from `charts`, which is already escaped, as safe."""
    return Markup(text)


def _safe(draw: Any) -> Any:
    return lambda *arguments: Markup(draw(*arguments))
