"""What an hour of an engine costs the operator, by pool: a pattern of engines' names, in which `*`
stands for any characters. An engine has the price of the longest pattern that matches its name.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.amounts import money
from billing.pricing.tables import EnginePrice
from core import lengths
from core.clock import Clock
from core.errors import BadRequest
from core.money import MINOR_DIGITS, units_of

MOST_PER_HOUR = 1_000_000  # major units


@dataclass(frozen=True, slots=True)
class EnginePriceDraft:
    """A price to be checked and saved. `per_hour` is in major units; `starts_at` is cut to its day in
    UTC. An engine of several devices costs what all of them do."""

    pool: str
    per_hour: str
    currency: str = "USD"
    starts_at: datetime | None = None  # None: today
    note: str = ""
    created_by: str = ""


def save(session: Session, clock: Clock, draft: EnginePriceDraft) -> EnginePrice:
    """Save the pool's price from a day on; a price of the same day is replaced."""
    pool = draft.pool.strip()
    if not 0 < len(pool) <= lengths.ENGINE or not pool.isprintable() or " " in pool:
        raise BadRequest(
            f"The pool {draft.pool[:40]!r} is not a pattern of engines' names.",
            next_step=f"Use 1 to {lengths.ENGINE} characters without spaces, such as h100-* or *.",
            param="pool",
        )
    if draft.currency not in MINOR_DIGITS:
        raise BadRequest(
            f"The currency {draft.currency[:10]!r} is unknown.",
            next_step=f"Use one of {', '.join(sorted(MINOR_DIGITS))}.",
            param="currency",
        )
    per_hour = _per_hour(draft.per_hour)
    start = (draft.starts_at or clock.now()).astimezone(UTC)
    start = start.replace(hour=0, minute=0, second=0, microsecond=0)
    row = session.get(EnginePrice, (pool, start))
    if row is None:
        row = EnginePrice(pool=pool, starts_at=start)
        session.add(row)
    row.currency, row.per_hour, row.note = draft.currency, per_hour, draft.note
    row.created_at, row.created_by = clock.now(), draft.created_by
    session.flush()
    return row


def _per_hour(written: str) -> int:
    try:
        units = units_of(written)
    except ValueError:
        units = -1
    if not 0 <= units <= units_of(MOST_PER_HOUR):
        raise BadRequest(
            f"The price per hour {written[:40]!r} is not an amount.",
            next_step=f"Use a number from 0 to {MOST_PER_HOUR} with at most 12 decimals.",
            param="per_hour",
        )
    return units


def listed(session: Session) -> list[EnginePrice]:
    """All prices by pool, newest first."""
    return list(
        session.scalars(
            select(EnginePrice).order_by(EnginePrice.pool, EnginePrice.starts_at.desc())
        )
    )


def describe(row: EnginePrice) -> dict[str, Any]:
    return {
        "pool": row.pool,
        "per_hour": money(row.per_hour, row.currency),
        "from": f"{row.starts_at:%Y-%m-%d}",
        "note": row.note,
        "created_by": row.created_by,
    }


@dataclass(frozen=True)
class EnginePrices:
    """All prices, for look-ups by engine and day."""

    rows: tuple[EnginePrice, ...]

    @classmethod
    def load(cls, session: Session) -> "EnginePrices":
        return cls(tuple(listed(session)))

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern[str], list[EnginePrice]]]:
        """The most specific pool first, and its newest price."""
        pools: dict[str, list[EnginePrice]] = {}
        for row in self.rows:
            pools.setdefault(row.pool, []).append(row)
        ordered = sorted(pools, key=lambda pool: (-len(pool.replace("*", "")), pool))
        return [(_pattern(pool), pools[pool]) for pool in ordered]

    def at(self, engine_id: str, day: datetime) -> EnginePrice | None:
        """The price of an engine on a day; None where no pool had one by then."""
        for pattern, prices in self._patterns:
            if pattern.fullmatch(engine_id):
                for price in prices:
                    if price.starts_at <= day:
                        return price
        return None


def _pattern(pool: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, pool.split("*"))), re.DOTALL)
