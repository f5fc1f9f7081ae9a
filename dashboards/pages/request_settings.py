"""Request settings of an organisation: its cache of complete answers."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import organisations
from core.tenants.response_cache import ERASED, SETTING, rule_of
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    viewer_of,
)

PATH = "/request-settings"
_YES_NO = (("no", "no"), ("yes", "yes"))
_LEAD = (
    "The response cache answers a repeated request without running the model. It keeps answers to "
    "requests with temperature 0 and without tools, unless you add the others. A hit uses no tokens "
    "and has its own price."
)


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "tenant"), deps_of(request)
    with deps.database.read() as session:
        settings = dict(organisations.get_tenant(session, viewer.scope).settings)
    rule = rule_of(settings)
    kept = "off" if rule is None else f"{rule.ttl_s} s"
    also = [] if rule is None else [n for n in ("sampled", "tools") if getattr(rule, n)]
    tile = Tile(
        "Response cache",
        kept,
        f"also: {', '.join(also)}" if also else "",
        "How long an answer is given again; off: only where a request asks with x-tollhouse-cache.",
    )
    erased = Tile("Last erased", str(settings.get(ERASED, "never"))[:19])
    page_data = PageData(
        "Request settings",
        _LEAD,
        tiles=[tile, erased],
        forms=_forms(settings) if deps.auth.may(viewer, "tenant", "write") else [],
    )
    return show(request, page_data)


def _forms(settings: dict[str, object]) -> list[Form]:
    rule = rule_of(settings)
    inputs = [
        Input("ttl_s", "Keep answers for (seconds)", "number", str(rule.ttl_s if rule else 3_600)),
        Input(
            "sampled",
            "Also temperature above 0",
            "select",
            _word(rule is not None and rule.sampled),
            _YES_NO,
        ),
        Input(
            "tools", "Also with tools", "select", _word(rule is not None and rule.tools), _YES_NO
        ),
    ]
    cache = Form(PATH, "Cache answers", {"act": "cache"}, inputs, title="Response cache")
    forms = [cache, Form(PATH, "Erase cached answers", {"act": "erase"}, title="Erase")]
    if rule is not None:
        forms.append(Form(PATH, "Turn off", {"act": "off"}, title="Turn the response cache off"))
    return forms


def _word(given: bool) -> str:
    return "yes" if given else "no"


def _cache(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    seconds = form_fields.get("ttl_s", "")
    if not (seconds.isascii() and seconds.isdecimal() and len(seconds) < 9):
        raise BadRequest(
            f"The time is {seconds[:20]!r}, not a whole number of seconds.", param="ttl_s"
        )
    rule = {name: form_fields.get(name) == "yes" for name in ("sampled", "tools")}
    with deps.database.transaction() as session:
        settings = {SETTING: {"ttl_s": int(seconds), **rule}}
        organisations.change_tenant(session, viewer.scope, deps.clock, settings=settings)
    return redirect_with_notice(request, PATH, "cache-set")


def _erase(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    with deps.database.transaction() as session:
        organisations.erase_cached_responses(session, viewer.scope, deps.clock)
    return redirect_with_notice(request, PATH, "cache-erased")


def _off(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    with deps.database.transaction() as session:
        off = {SETTING: None}
        organisations.change_tenant(session, viewer.scope, deps.clock, settings=off)
        organisations.erase_cached_responses(session, viewer.scope, deps.clock)
    return redirect_with_notice(request, PATH, "cache-off")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, cache=_cache, erase=_erase, off=_off), methods=["POST"]),
]
