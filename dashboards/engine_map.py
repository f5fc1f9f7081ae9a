"""The engine map: a card for each engine: sequences, KV cache, adapters, and whose time it was."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from html import escape

from markupsafe import Markup
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from billing.usage.tables import DailyEngineTime
from core.tenants.models import Adapter, Tenant
from dashboards import charts
from dashboards.backend import EngineView
from dashboards.scales import grouped

_SQUARES, _A_ROW, _SIZE, _STEP = 48, 16, 12, 15
_MOST_ADAPTERS = 8
_MOST_TENANTS = 5
_OPEN = ("resident", "loading")  # states of adapters that take memory, or are about to


@dataclass(frozen=True, slots=True)
class Share:
    tenant: str  # name
    percent: float


@dataclass(frozen=True, slots=True)
class Card:
    engine: EngineView
    sequences: Markup  # SVG
    kv: Markup  # SVG; "" if this kind of engine does not report it
    kv_words: str
    adapters: Sequence[tuple[str, str]]  # (name, state)
    more_adapters: int
    shares: Sequence[Share]
    shares_bar: Markup


def cards(session: Session, engines: Sequence[EngineView], now: datetime) -> list[Card]:
    names = _adapter_names(session, engines)
    shares = _shares(session, now)
    return [_card(each, names, shares.get(each.engine_id, [])) for each in engines]


def _card(each: EngineView, names: dict[str, str], shares: list[Share]) -> Card:
    in_memory = [pair for pair in each.held if pair[1] in _OPEN]
    in_memory.sort(key=lambda pair: (_OPEN.index(pair[1]), names.get(pair[0], "~"), pair[0]))
    held = [(names.get(digest, digest[:12]), state) for digest, state in in_memory]
    kv_title = f"KV cache of {each.engine_id}"
    return Card(
        each,
        Markup(sequences(each.running, each.waiting)),
        Markup(charts.meter(kv_title, each.blocks_used, each.blocks_total))
        if each.blocks_total
        else Markup(""),
        f"{100 * each.kv_share:.1f} %" if each.kv_share is not None else "not reported",
        held[:_MOST_ADAPTERS],
        max(0, len(held) - _MOST_ADAPTERS),
        shares,
        Markup(_bar(each.engine_id, shares)) if shares else Markup(""),
    )


def sequences(running: int, waiting: int) -> str:
    """A square for each sequence: filled while it runs, outlined while it waits."""
    shown = ["run"] * running + ["wait"] * waiting
    rest = len(shown) - _SQUARES
    squares = "".join(
        f'<rect class="{kind}" x="{index % _A_ROW * _STEP + 1}" y="{index // _A_ROW * _STEP + 1}" '
        f'width="{_SIZE}" height="{_SIZE}" rx="2"/>'
        for index, kind in enumerate(shown[:_SQUARES])
    )
    lines = max(1, -(-min(len(shown), _SQUARES) // _A_ROW))
    label = f"{grouped(running)} running, {grouped(waiting)} waiting"
    empty = f'<rect class="none" x="1" y="1" width="{_A_ROW * _STEP - 3}" height="{_SIZE}" rx="2"/>'
    svg = (
        f'<svg class="sequences" viewBox="0 0 {_A_ROW * _STEP} {lines * _STEP}" role="img" '
        f'aria-label="{label}">{squares or empty}</svg>'
    )
    return svg + (f"<small>and {grouped(rest)} more</small>" if rest > 0 else "")


def _bar(engine: str, shares: Sequence[Share]) -> str:
    left, marks = 0.0, []
    for number, each in enumerate(shares):
        said = escape(f"{each.tenant}: {each.percent:.1f} %")
        marks.append(
            f'<rect class="s{number}" x="{2 * left:.1f}" width="{2 * each.percent:.1f}" height="12">'
            f"<title>{said}</title></rect>"
        )
        left += each.percent
    said = ", ".join(f"{each.tenant} {each.percent:.1f} %" for each in shares)
    return (
        f'<svg class="shares" viewBox="0 0 200 12" role="img" preserveAspectRatio="none" '
        f'aria-label="{escape(f"Time of {engine} by tenant: {said}")}">{"".join(marks)}</svg>'
        + charts.legend([charts.Series(f"{s.tenant} {s.percent:.1f} %", []) for s in shares])
    )


def _adapter_names(session: Session, engines: Sequence[EngineView]) -> dict[str, str]:
    """By digest; tenants with the same weights share a digest, and the first of them names it."""
    wanted = {digest for each in engines for digest, state in each.held if state in _OPEN}
    if not wanted:
        return {}
    found = select(Adapter.digest, Adapter.name, Tenant.name).join(
        Tenant, Tenant.id == Adapter.tenant_id
    )
    rows = session.execute(found.where(Adapter.digest.in_(wanted)).order_by(Adapter.id.desc()))
    return {digest: f"{name} ({tenant})" for digest, name, tenant in rows}


def _shares(session: Session, now: datetime) -> dict[str, list[Share]]:
    """Each tenant's part of an engine's busy time, yesterday and today; the smallest are together."""
    table = DailyEngineTime
    since = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    rows = session.execute(
        select(table.engine_id, table.tenant_id, func.sum(table.busy_us))
        .where(table.at >= since)
        .group_by(table.engine_id, table.tenant_id)
    ).all()
    by_engine: dict[str, dict[str, int]] = {}
    for engine, tenant, busy in rows:
        by_engine.setdefault(engine, {})[tenant] = int(busy)
    shown = {name for sums in by_engine.values() for name in _largest(sums)}
    tenants = session.execute(select(Tenant.id, Tenant.name).where(Tenant.id.in_(shown)))
    names = {row[0]: row[1] for row in tenants}
    return {engine: _shares_of(sums, names) for engine, sums in by_engine.items()}


def _largest(sums: dict[str, int]) -> list[str]:
    return sorted(sums, key=lambda tenant: (-sums[tenant], tenant))[:_MOST_TENANTS]


def _shares_of(sums: dict[str, int], names: dict[str, str]) -> list[Share]:
    whole = sum(sums.values()) or 1
    largest = _largest(sums)
    found = [Share(names.get(each, each), 100 * sums[each] / whole) for each in largest]
    rest = whole - sum(sums[each] for each in largest)
    count = len(sums) - len(largest)
    return (
        [*found, Share(f"{count} other{'s' if count > 1 else ''}", 100 * rest / whole)]
        if count
        else found
    )
