"""Engines: a map and a table of replicas as of their last heartbeats, adapters by state, and use by
tenant."""

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.tables import DailyTenantUsage
from core import engine_drains
from core.errors import BadRequest
from core.tenants import adapters, plan_store
from core.tenants.models import Tenant
from dashboards import charts, engine_map
from dashboards.backend import EngineView
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    root_of,
    wants_csv,
)
from dashboards.render import page, svg
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/engines"
REPLICAS = [
    Column("engine", "Engine", "code"),
    Column("model", "Model"),
    Column("state", "State", "badge"),
    Column("running", "Running", "whole", "Sequences in the current batch."),
    Column("waiting", "Waiting", "whole", "Sequences waiting to be scheduled."),
    Column("tokens", "Tokens waiting", "whole", "Prompt tokens not yet computed."),
    Column(
        "kv",
        "KV in use",
        "figure",
        "Share of KV cache blocks in use; preemptions start above about 85 %.",
    ),
    Column("adapters", "Adapters", "figure", "Adapters known to the engine, in any state."),
]
ADAPTERS = [Column("state", "State", "badge"), Column("count", "Adapters", "whole")]
QUARANTINE = [
    Column("tenant", "Tenant", link="href"),
    Column("name", "Adapter"),
    Column("digest", "Digest", "code"),
    Column("since", "Since", "moment"),
    Column("reason", "Reason"),
]
SHARES = [
    Column("tenant", "Tenant", link="href"),
    Column(
        "weight",
        "Weight",
        "whole",
        "From the plan. Under contention a tenant's share is its weight over the sum of weights.",
    ),
    Column(
        "fair",
        "Fair share",
        "figure",
        "Share of the engines if all these tenants were active at once.",
    ),
    Column("input_tokens", "Input", "whole"),
    Column("cached_tokens", "Cached", "whole"),
    Column("output_tokens", "Output", "whole"),
    Column("had", "Actual share", "figure", "Share of all computed input and output tokens."),
]


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "operations"), deps_of(request)
    may_write = deps.auth.may(viewer, "operations", "write")
    now = deps.clock.now()
    engines = list(deps.backend.engines())
    with deps.database.read() as session:
        shares = _shares(session, now, root_of(request))
        cards = engine_map.cards(session, engines, now)
        quarantined = _quarantined(session, root_of(request))
    table = Table("Replicas", REPLICAS, [_row(each) for each in engines], totals=False)
    if wants_csv(request):
        return table.csv("engines")
    page_data = PageData(
        "Engines",
        "As of each engine's last heartbeat. The Grafana dashboard `engine` has the history.",
        tiles=_tiles(engines),
        links=[
            ("/operator/engines/upstreams", "Reload upstreams"),
            ("/adapters", "Preload adapters"),
        ],
        tables=[
            table,
            Table(
                "Adapters by state", ADAPTERS, _by_state(engines), totals=False, empty=_NO_ADAPTER
            ),
            Table(
                "Adapters in quarantine",
                QUARANTINE,
                quarantined,
                totals=False,
                empty="None. An adapter with which engines hang or die may not be used any more.",
            ),
            Table(
                "Use by tenant, yesterday and today",
                SHARES,
                shares,
                totals=False,
                empty="No requests since yesterday.",
            ),
        ],
    )
    acts = [(card, _act(card.engine) if may_write else None) for card in cards]
    return show(request, page_data, template="engines.html", cards=acts)


def map_of(request: Request) -> Response:
    """The map alone, which the page asks for every few seconds."""
    viewer, deps = operator_of(request, "operations"), deps_of(request)
    may_write = deps.auth.may(viewer, "operations", "write")
    engines = list(deps.backend.engines())
    with deps.database.read() as session:
        cards = engine_map.cards(session, engines, deps.clock.now())
    acts = [(card, _act(card.engine) if may_write else None) for card in cards]
    return page(request, "engine_map.html", cards=acts)


_NO_ADAPTER = "No engine holds an adapter. Adapters are loaded on their first request."


def _tiles(engines: list[EngineView]) -> list[Tile]:
    healthy = sum(each.state == "healthy" for each in engines)
    used, total = sum(e.blocks_used for e in engines), sum(e.blocks_total for e in engines)
    meter = svg(charts.meter("KV in use", used, total)) if total else ""
    return [
        Tile(
            "Replicas",
            f"{healthy} of {len(engines)}",
            "healthy",
            state="good" if healthy == len(engines) else "bad",
        ),
        Tile("Running", grouped(sum(each.running for each in engines))),
        Tile("Waiting", grouped(sum(each.waiting for each in engines))),
        Tile("KV in use", f"{100 * used / total:.1f} %" if total else "–", meter=meter),
    ]


def _row(each: EngineView) -> dict[str, Any]:
    return {
        "engine": each.engine_id,
        "model": each.model,
        "state": each.state,
        "running": each.running,
        "waiting": each.waiting,
        "tokens": each.tokens_waiting,
        "kv": f"{100 * each.kv_share:.1f} %" if each.kv_share is not None else None,
        "adapters": str(sum(each.adapters.values())),
    }


def _quarantined(session: Session, root: str) -> list[dict[str, Any]]:
    return [
        {
            "tenant": row.tenant_id,
            "href": f"{root}/operator/tenants/{row.tenant_id}",
            "name": f"{row.base_model}:{row.name}",
            "digest": row.digest,
            "since": row.quarantined_at,
            "reason": row.quarantine_reason,
        }
        for row in adapters.in_quarantine(session)
    ]


def _act(each: EngineView) -> Form:
    act, label = ("resume", "Resume") if each.state == "draining" else ("drain", "Drain")
    return Form(PATH, label, {"act": act, "engine": each.engine_id})


def _by_state(engines: list[EngineView]) -> list[dict[str, Any]]:
    counts: dict[str, int] = {}
    for each in engines:
        for state, number in each.adapters.items():
            counts[state] = counts.get(state, 0) + number
    return [{"state": state, "count": counts[state]} for state in sorted(counts)]


def _shares(session: Session, now: datetime, root: str) -> list[dict[str, Any]]:
    table = DailyTenantUsage
    yesterday = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    used = session.execute(
        select(
            table.tenant_id,
            func.sum(table.input_tokens),
            func.sum(table.cached_tokens),
            func.sum(table.output_tokens),
        )
        .where(table.at >= yesterday)
        .group_by(table.tenant_id)
    ).all()
    tenants = {
        tenant.id: tenant
        for tenant in session.scalars(select(Tenant).where(Tenant.id.in_([row[0] for row in used])))
    }
    plans = plan_store.all_of(session)
    weights = {
        id: plans[tenant.plan].weight for id, tenant in tenants.items() if tenant.plan in plans
    }
    work = {row[0]: int(row[1]) - int(row[2]) + int(row[3]) for row in used}
    all_work, all_weight = sum(work.values()), sum(weights.values())
    return [
        {
            "tenant": tenants[row[0]].name if row[0] in tenants else row[0],
            "href": f"{root}/operator/tenants/{row[0]}",
            "weight": weights.get(row[0], 1),
            "fair": f"{100 * weights.get(row[0], 1) / max(1, all_weight):.1f} %",
            "input_tokens": int(row[1]),
            "cached_tokens": int(row[2]),
            "output_tokens": int(row[3]),
            "had": f"{100 * work[row[0]] / all_work:.1f} %" if all_work else "–",
        }
        for row in sorted(used, key=lambda row: -work[row[0]])
    ]


def _drain(request: Request, form_fields: Fields) -> Response:
    return _change(request, form_fields, engine_drains.drain, "engine-drained")


def _resume(request: Request, form_fields: Fields) -> Response:
    return _change(request, form_fields, engine_drains.resume, "engine-resumed")


def _change(
    request: Request, form_fields: Fields, act: Callable[..., None], notice: str
) -> Response:
    viewer, deps = operator_of(request, "operations", "write"), deps_of(request)
    name = form_fields.get("engine", "")
    if name not in {each.engine_id for each in deps.backend.engines()}:
        raise BadRequest(
            f"There is no engine {name[:80]!r}.",
            next_step="Choose one from the map.",
            param="engine",
        )
    with deps.database.transaction() as session:
        act(session, deps.clock, viewer.scope.actor, name)
    deps.backend.changed()
    return redirect_with_notice(request, PATH, notice)


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(f"{PATH}/map", map_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, drain=_drain, resume=_resume), methods=["POST"]),
]
