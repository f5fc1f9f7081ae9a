"""Models and prices: the price versions with their dates, and saving of new ones."""

from datetime import datetime
from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.pricing import price_lists, price_terms, prices
from billing.pricing.price_lists import Listed
from billing.pricing.pricing import PARTS, PRICED_AS, Component, Rate
from billing.pricing.tables import PriceVersionRow
from billing.rating import price_changes, price_imports
from billing.rating.price_imports import Terms
from core.tenants import audit
from core.tenants.models import Tenant
from core.tenants.organisations import tenant_named
from dashboards.filters import start_of_day
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/prices"
MAX_ROWS = 500
COLUMNS = [
    Column("model", "Model"),
    Column("tenant", "For", about="All tenants, or the tenant of a negotiated price."),
    Column("adapter", "Adapter"),
    Column("state", "State", "badge"),
    Column("input", "Input", "figure", "Per million computed input tokens."),
    Column(
        "cached_input", "Cached", "figure", "Per million input tokens found in the prefix cache."
    ),
    Column("output", "Output", "figure", "Per million delivered tokens."),
    Column("others", "Others"),
    Column("currency", "Currency"),
    Column("since", "From", "moment"),
    Column("until", "To", "moment"),
    Column("note", "Note"),
    Column("by", "Saved by"),
    Column("version", "Version", "code", "Pinned on each request at admission."),
]
_FIELDS = (
    *("input", "cached_input", "output", "request", "adapter", "gpu_second", "moderation"),
    *("audio_second", "image", "character"),
    *(each.value for each in PARTS),
)
_WORDS = {
    "input": "Input per million tokens",
    "cached_input": "Cached input per million tokens",
    "output": "Output per million tokens",
    "request": "Per request",
    "adapter": "Per request with an adapter",
    "gpu_second": "Per GPU second",
    "moderation": "Per moderation call",
    "audio_second": "Per audio second",
    "image": "Per image",
    "character": "Per million characters",
    "cache_write_5m": "Cache writes for five minutes per million tokens",
    "cache_write_1h": "Cache writes for an hour per million tokens",
    "audio_input": "Audio input per million tokens",
    "image_input": "Image input per million tokens",
    "reasoning": "Reasoning per million tokens",
    "audio_output": "Audio output per million tokens",
    "image_output": "Image output per million tokens",
    "search": "Per search of the web",
    "tool_call": "Per call of a provider's tool",
}


def page_of(request: Request) -> Response:
    operator_of(request, "prices")
    deps = deps_of(request)
    now = deps.clock.now()
    query = select(PriceVersionRow).order_by(
        PriceVersionRow.model, PriceVersionRow.tenant_id, PriceVersionRow.effective_from.desc()
    )
    with deps.database.read() as session:
        found = session.scalars(query.limit(MAX_ROWS)).all()
        ids = {row.tenant_id for row in found if row.tenant_id}
        named = session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(ids)))
        names = {row[0]: row[1] for row in named}
    rows = [_row(each, names, now) for each in found]
    empty = "No prices yet. A model without a price cannot be used."
    table = Table(
        "Price versions",
        COLUMNS,
        rows,
        totals=False,
        empty=empty,
        next_step=("#new-version", "Save a price"),
    )
    if wants_csv(request):
        return table.csv("prices")
    served = list(deps.backend.base_models())
    page_data = PageData(
        "Models and prices",
        "A price version is never edited. To correct one, save a new version and re-rate past usage.",
        tiles=[
            Tile("Models served", grouped(len(served)), ", ".join(served)),
            Tile("Prices in force", grouped(sum(row["state"] == "active" for row in rows))),
            Tile("Versions", grouped(len(rows))),
        ],
        tables=[table],
        forms=[_form(served), _list_form()],
    )
    return show(request, page_data)


def _row(each: PriceVersionRow, names: dict[str, str], now: datetime) -> dict[str, Any]:
    over = each.effective_to is not None and each.effective_to <= now
    state = "ended" if over else "active" if each.effective_from <= now else "planned"
    rates, discount_ppm = price_terms.load(each.terms)
    shown = {
        name: _rate_text(Component(name), rates) for name in ("input", "cached_input", "output")
    }
    others = [
        f"{_WORDS[name].lower().replace('gpu', 'GPU')} {_rate_text(Component(name), rates)}"
        for name in _FIELDS[3:]
        if Component(name) in rates
    ]
    if discount_ppm:
        others.append(f"less {discount_ppm / 10_000:g} %")
    return shown | {
        "model": "all models" if each.model == "*" else each.model,
        "tenant": names.get(each.tenant_id, each.tenant_id) or "all tenants",
        "adapter": "any" if each.adapter == "*" else each.adapter,
        "state": state,
        "others": ", ".join(others),
        "currency": each.currency,
        "since": each.effective_from,
        "until": each.effective_to,
        "note": each.note,
        "by": each.created_by,
        "version": each.id,
    }


def _rate_text(component: Component, rates: Any) -> str | None:
    """Per million tokens or per piece, with all tiers."""
    rate: Rate | None = rates.get(component)
    return None if rate is None else price_terms.in_words(component, rate)


def _form(served: list[str]) -> Form:
    options = [(name, name) for name in [*served, "*"]]
    usual = {"input": "0.15", "cached_input": "0.075", "output": "0.60"}
    inputs = [
        Input("model", "Model", "select", options=options),
        Input("tenant", "For the tenant", required=False),
        Input("currency", "Currency", value="USD"),
    ]
    for name in _FIELDS:
        value = usual.get(name, "")
        component = Component(name)
        hint = f"without it, as {PRICED_AS[component].value}" if component in PRICED_AS else ""
        inputs.append(Input(name, _WORDS[name], "number", value, required=name in usual, hint=hint))
    inputs.append(Input("from", "From", "date", required=False, hint="default: now"))
    inputs.append(Input("note", "Note", required=False))
    return Form(
        PATH,
        "Test and save",
        {"act": "save"},
        inputs,
        title="New version",
        panel=True,
        about="The price is first tested on sample usage and rejected if that cannot be billed. "
        "The previous version in the same currency ends when this one starts.",
    )


_LIST_FIELDS = ("content", "models", "markup", "region", "from")


def _list_form() -> Form:
    named = "NAME or NAME=PUBLIC, separated by commas; * for every one"
    inputs = [
        Input("content", "Price list", "area", hint="JSON of LiteLLM, of OpenRouter or yours"),
        Input("models", "Models", hint=named),
        Input("markup", "Mark-up in percent", value="0"),
        Input("region", "Region", required=False, hint="of rows that have one"),
        Input("from", "From", "date", required=False, hint="default: now"),
    ]
    about = "All of the list is saved or nothing; prices that it does not change stay as they are."
    return Form(PATH, "Compare", {"act": "preview"}, inputs, title="Price list", about=about)


def _listed(request: Request, form_fields: Fields, actor: str) -> tuple[list[Listed], Terms]:
    named, markup = form_fields.get("models", ""), form_fields.get("markup", "0")
    models = {} if named == "*" else price_lists.named_models(filter(None, named.split(",")))
    listed = price_lists.wanted(
        form_fields.get("content", ""),
        models,
        every=named == "*",
        region=form_fields.get("region", ""),
    )
    start = start_of_day("from", form_fields.get("from", "")) or deps_of(request).clock.now()
    note = f"imported from a list, mark-up {markup.removesuffix('%')} %"
    return listed, Terms(price_lists.percent_of(markup), start, note, actor)


def _preview(request: Request, form_fields: Fields) -> Response:
    """What a list would change, with a form that saves it."""
    viewer = operator_of(request, "prices", "write")
    listed, terms = _listed(request, form_fields, viewer.scope.actor)
    given = {name: form_fields.get(name, "") for name in _LIST_FIELDS}
    with deps_of(request).database.read() as session:
        found = price_imports.described(price_imports.compare(session, listed, terms))
    columns = [
        Column("model", "Model"),
        Column("component", "Component"),
        Column("before", "Before", "figure"),
        Column("after", "After", "figure"),
        Column("currency", "Currency"),
    ]
    empty = "The prices are as in the list."
    left_out = [
        {"model": model, "fields": ", ".join(names)} for model, names in found["left_out"].items()
    ]
    page_data = PageData(
        "Price list",
        "Nothing is saved yet.",
        tables=[
            Table("Changes", columns, found["changes"], totals=False, empty=empty),
            Table(
                "Left out, without a matching component",
                [Column("model", "Model"), Column("fields", "Fields")],
                left_out,
                totals=False,
                empty="None.",
            ),
        ],
        forms=[Form(PATH, "Save these prices", {"act": "import"} | given)],
    )
    return show(request, page_data)


def _import(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    actor = viewer.scope.actor
    listed, terms = _listed(request, form_fields, actor)
    with deps.database.transaction() as session:
        after = price_imports.described(price_imports.save(session, deps.clock, listed, terms))
        if after["changes"]:
            audit.record_operator(
                session, deps.clock, actor, "price.import", "prices", before=None, after=after
            )
    return redirect_with_notice(request, PATH, "price-saved")


def _save(request: Request, form_fields: Fields) -> Response:
    viewer, deps = operator_of(request, "prices", "write"), deps_of(request)
    written = {name: form_fields[name] for name in _FIELDS if form_fields.get(name)}
    now = deps.clock.now()
    with deps.database.transaction() as session:
        tenant_id = ""
        if form_fields.get("tenant"):
            tenant_id = tenant_named(session, form_fields["tenant"]).id
        draft = prices.PriceDraft(
            form_fields.get("model", ""),
            written,
            start_of_day("from", form_fields.get("from", "")) or now,
            tenant_id=tenant_id,
            currency=form_fields.get("currency", "USD"),
            note=form_fields.get("note", ""),
            created_by=viewer.scope.actor,
        )
        created = price_changes.save(session, deps.clock, draft)
        after = {"version": created.id, "model": draft.model, "tenant_id": tenant_id, **written}
        audit.record_operator(
            session,
            deps.clock,
            viewer.scope.actor,
            "price.save",
            created.id,
            before=None,
            after=after,
        )
    return redirect_with_notice(request, PATH, "price-saved")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, save=_save, preview=_preview, **{"import": _import}),
        methods=["POST"],
    ),
]
