"""Request settings of an organisation: its cache of complete answers, and its request log."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.notices import request_sinks
from billing.notices.request_sinks import Sink
from core.errors import BadRequest
from core.tenants import organisations
from core.tenants.response_cache import ERASED, SETTING, rule_of
from dashboards.once import redirect_with_secret
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
        sink = request_sinks.sink_of(session, viewer.scope)
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
        tiles=[tile, erased, _log_tile(sink)],
        forms=_forms(settings, sink) if deps.auth.may(viewer, "tenant", "write") else [],
    )
    return show(request, page_data)


def _log_tile(sink: Sink | None) -> Tile:
    about = "A record of each request goes to a receiver of your own, signed and from memory."
    if sink is None:
        return Tile("Request log", "off", about=about)
    return Tile("Request log", "with texts" if sink.content else "without texts", sink.url, about)


def _forms(settings: dict[str, object], sink: Sink | None) -> list[Form]:
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
    receiver = [
        Input("url", "URL", "url", sink.url if sink else ""),
        Input("content", "With texts", "select", _word(bool(sink and sink.content)), _YES_NO),
    ]
    about = "Texts are those that moderation let pass. The signing secret is shown once."
    log = Form(PATH, "Log requests", {"act": "log"}, receiver, title="Request log", about=about)
    forms.append(log)
    if sink is not None:
        forms.append(Form(PATH, "Stop logging", {"act": "log_off"}, title="Stop the request log"))
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


def _log(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    url, content = form_fields.get("url", ""), form_fields.get("content") == "yes"
    deps.alert_targets.check([url])
    with deps.database.transaction() as session:
        options = request_sinks.SinkOptions(content)
        sink = request_sinks.set_sink(session, viewer.scope, deps.clock, url, options)
    return redirect_with_secret(request, PATH, "log-set", sink.secret)


def _log_off(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "tenant", "write"), deps_of(request)
    with deps.database.transaction() as session:
        request_sinks.remove_sink(session, viewer.scope, deps.clock)
    return redirect_with_notice(request, PATH, "log-off")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, cache=_cache, erase=_erase, off=_off, log=_log, log_off=_log_off),
        methods=["POST"],
    ),
]
