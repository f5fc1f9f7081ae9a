"""Costs: spend by day and component, forecast, remaining credit and budgets, and savings."""

from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.accounts.tables import BillingAccount
from billing.ledger.tables import CreditGrant
from billing.notices import budgets
from billing.notices.tables import Budget
from billing.organisations.organisations import percent
from billing.organisations.tables import OrganisationLink
from billing.reports import savings
from billing.usage.day_range import Range
from core.money import round_half_away
from dashboards import charts, compared_periods, explorer, usage_totals
from dashboards.explorer import day_presets
from dashboards.filters import choice, date_range
from dashboards.formats import change, exact, money, money_label, share
from dashboards.page_data import Chart, PageData, Tile, show
from dashboards.pages import cost_breakdown
from dashboards.pages.common import deps_of, viewer_of, wants_csv
from dashboards.render import svg
from dashboards.scales import Number, grouped, short
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

COMPONENTS = {
    "input_amount": "Input",
    "cached_amount": "Cached input",
    "output_amount": "Output",
    "request_amount": "Requests",
    "adapter_amount": "Adapters",
    "moderation_amount": "Moderation",
    "audio_amount": "Audio seconds",
    "image_amount": "Images",
    "character_amount": "Spoken characters",
    "gpu_amount": "GPU seconds",
    "waived_amount": "Waived",
    "cache_write_5m_amount": "Cache writes",
    "cache_write_1h_amount": "Cache writes, one hour",
    "audio_input_amount": "Audio input",
    "image_input_amount": "Image input",
    "reasoning_amount": "Reasoning",
    "audio_output_amount": "Audio output",
    "image_output_amount": "Image output",
    "search_amount": "Searches",
    "tool_call_amount": "Tool calls",
}


def markup_of(session: Session, tenant_id: str) -> int:
    """Parts per million that invoices add to the tenant's charges, for its parent organisation."""
    found = session.get(OrganisationLink, tenant_id)
    return found.markup_ppm if found else 0


def costs_table(found: usage_totals.UsageTotals, currency: str, markup_ppm: int = 0) -> Table:
    used = [key for key in COMPONENTS if found.total(key)] or ["input_amount", "output_amount"]
    columns = [
        Column("group", usage_totals.GROUPS[found.group_by]),
        *(Column(key, COMPONENTS[key], "money") for key in used),
        Column("amount", "Total", "money", "The sum of the components, before tax and credits."),
    ]
    rows: list[dict[str, Any]] = [
        {"group": found.name(group), "amount": sums["amount"], **{key: sums[key] for key in used}}
        for group, sums in sorted(found.counts.items(), key=lambda pair: -pair[1]["amount"])
    ]
    if markup_ppm:
        columns.append(
            Column("marked_up", "With mark-up", "money", "What the invoice asks for, before tax.")
        )
        before = 0
        for row in rows:  # rounded cumulatively, so that the rows sum to the mark-up of the whole
            whole = before + row["amount"]
            added = with_markup(whole, markup_ppm) - with_markup(before, markup_ppm)
            row["marked_up"], before = added, whole
    caption = f"Spend by {usage_totals.GROUPS[found.group_by].lower()}"
    empty = "No charges in this period. Charges appear a few seconds after a request ends."
    send = ("/playground", "Send a request")
    return Table(caption, columns, rows, currency, empty=empty, next_step=send)


def with_markup(units: int, markup_ppm: int) -> int:
    return units + round_half_away(units * markup_ppm, 10**6)


def forecast(spent: int, corrected: int, month: Range, now: datetime) -> int:
    """Spend at the end of the month at this month's mean rate, in picounits. What was `corrected`
    is part of `spent`, and happens once."""
    elapsed = max(1, int((now - month.start).total_seconds()))
    usage = spent - corrected
    return usage * int((month.month_end - month.start).total_seconds()) // elapsed + corrected


def costs(request: Request) -> Response:
    viewer, deps = viewer_of(request, "costs"), deps_of(request)
    now = deps.clock.now()
    month = Range.month_of(now, viewer.timezone)
    span = date_range(request, now, month.days, viewer.timezone)
    group_by = choice(request, "by", tuple(usage_totals.GROUPS), "model")
    with deps.database.report() as session:
        found = usage_totals.read(session, viewer.scope, span, now, group_by)
        this_month = found
        if (span.first, span.last) != (month.first, month.last):
            this_month = usage_totals.read(session, viewer.scope, month, now, "model")
        earlier = None
        if compared_periods.wanted(request):
            past = explorer.before(span)
            earlier = usage_totals.read(session, viewer.scope, past, now, group_by)
        corrected = usage_totals.corrections(session, viewer.scope, month)
        saved = savings.read(session, viewer.scope, span)
        tiles = _remaining_tiles(session, viewer, now)
        markup_ppm = markup_of(session, viewer.scope.tenant_id)
    table = costs_table(found, viewer.currency, markup_ppm)
    if wants_csv(request):
        return table.csv(f"costs-{span.first}-{span.last}")
    forecast_amount = forecast(this_month.total("amount"), corrected, month, now)
    presets, custom = day_presets(request, span, month.last)
    page_data = PageData(
        "Costs",
        "Usage at the prices pinned when each request was admitted, before tax and credits, by days of "
        f"{viewer.timezone}.",
        span=span,
        presets=presets,
        custom=custom,
        views=[_compare_link(request)],
        groups=usage_totals.GROUPS,
        by=group_by,
        tiles=[
            *_spend_tiles(found, viewer, forecast_amount, earlier),
            *_markup_tiles(found.total("amount"), viewer.currency, markup_ppm),
            *tiles,
            *_saved_tiles(saved, viewer.currency),
        ],
        charts=_charts(found, viewer.currency) if table.rows else [],
        tables=[table],
        links=[cost_breakdown.link(span, group_by)],
    )
    return show(request, page_data)


def _compare_link(request: Request) -> explorer.Link:
    asked, on = request.query_params, compared_periods.wanted(request)
    kept = {name: asked[name] for name in ("from", "to", "by") if asked.get(name)}
    href = f"?{urlencode(kept if on else kept | {'compare': '1'})}"
    return explorer.Link("Compare with the period before", href, on)


def _spend_tiles(
    found: usage_totals.UsageTotals,
    viewer: Viewer,
    forecast_amount: int,
    earlier: usage_totals.UsageTotals | None,
) -> list[Tile]:
    against = ""
    if earlier is not None:
        before = earlier.total("amount")
        against = change(found.total("amount"), before, lambda units: money(units, viewer.currency))
    spent, cached = found.total("amount"), found.total("cached_tokens")
    return [
        Tile(
            "Spend",
            money(spent, viewer.currency),
            against or f"exactly {exact(spent)}",
            "The sum of the charges in this period.",
        ),
        Tile(
            "Forecast for this month",
            money(forecast_amount, viewer.currency),
            about="This month's usage so far, extrapolated at the same rate, and its corrections.",
        ),
        Tile(
            "Cached share of input",
            share(cached, found.total("input_tokens")),
            about="Cached input tokens cost less than computed ones.",
        ),
    ]


def _markup_tiles(spent: int, currency: str, markup_ppm: int) -> list[Tile]:
    if not markup_ppm:
        return []
    rate = f"mark-up {percent(markup_ppm)} %"
    about = "What the invoice asks for this usage, before tax and credits."
    return [
        Tile("Spend with mark-up", money(with_markup(spent, markup_ppm), currency), rate, about)
    ]


def _remaining_tiles(session: Session, viewer: Viewer, now: datetime) -> list[Tile]:
    """Remaining credit, and each budget of the whole organisation with its use."""
    tenant_id, currency = viewer.scope.tenant_id, viewer.currency
    live = CreditGrant.expires_at.is_(None) | (CreditGrant.expires_at > now)
    left = session.scalar(
        select(func.sum(CreditGrant.remaining)).where(
            CreditGrant.tenant_id == tenant_id, CreditGrant.currency == currency, live
        )
    )
    tiles = [
        Tile(
            "Credit left",
            money(int(left or 0), currency),
            about="Prepaid and promotional credit that has not expired.",
        )
    ]
    account = session.get(BillingAccount, tenant_id)
    for each in session.scalars(
        select(Budget).where(
            Budget.tenant_id == tenant_id, Budget.scope == "tenant", Budget.ended_at.is_(None)
        )
    ):
        window = budgets.window_of(each.window, now, account.timezone if account else "UTC")
        used, back = budgets.spent_in(session, each, window)
        name = each.name or "Budget"
        span = "in total" if each.window == "total" else f"per {each.window}"
        tiles.append(
            Tile(
                f"Left in budget {name}",
                money(max(0, each.cap - used + back), currency),
                f"of {money(each.cap, currency)} {span}",
                "The cap minus the spend in its window.",
                state="bad" if used - back >= each.cap else "",
                meter=svg(charts.meter(name, (used - back) / 1e12, each.cap / 1e12)),
            )
        )
    return tiles


def _saved_tiles(saved: savings.Savings, currency: str) -> list[Tile]:
    return [
        Tile(
            "Saved by caching",
            money(saved.caching, currency),
            about="Cached tokens at the average price of computed ones, minus what they cost.",
        ),
        Tile(
            "Saved by prompt order",
            money(saved.ordering, currency),
            f"{grouped(saved.reordered_tokens)} tokens",
            "The part saved by caching that prompt order made possible.",
        ),
    ]


def _charts(found: usage_totals.UsageTotals, currency: str) -> list[Chart]:
    parts = [
        charts.Series(title, found.per_step(key))
        for key, title in COMPONENTS.items()
        if any(found.per_step(key))
    ]
    running, line = 0, []
    for amount in found.per_step("amount"):
        running += amount
        line.append(running)
    total = [charts.Series("spend", line)]
    value = money_label(currency)
    return [
        Chart(
            f"By day, {currency}",
            svg(charts.stacked_bars("Spend", found.labels, parts, amount_axis, value)),
        ),
        Chart(
            f"Cumulative, {currency}",
            svg(charts.lines("Spend, cumulative", found.labels, total, amount_axis, value)),
        ),
    ]


def amount_axis(units: Number) -> str:
    return short(float(units) / 1e12)


ROUTES = [Route("/costs", costs)]
