"""The sets of labels that are counted apart: their number is bounded by tenant and by label.

A set beyond the bound is stored with the value `other`, before its events are, so that every sum by
label has few rows. Workers that store at the same time may pass the bound by a few sets.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec import structs
from sqlalchemy import Table, select
from sqlalchemy.orm import Session

from billing.usage.tables import LabelSet
from core import labels
from core.database import insert_new
from core.events import UsageEvent
from core.tenants.scope import TenantScope

MOST_VALUES = 500  # of a label
MOST_SETS = 5_000  # of a tenant
_SETS: Table = LabelSet.__table__  # type: ignore[assignment]


def bounded(session: Session, events: Sequence[UsageEvent], now: datetime) -> Sequence[UsageEvent]:
    """The events with the labels that are stored; new sets are noted."""
    given = {(event.tenant_id, event.labels) for event in events if event.labels is not None}
    if not given:
        return events
    chosen: dict[tuple[str, str | None], str] = {}
    for tenant_id in {tenant for tenant, _ in given}:
        asked = sorted(text for tenant, text in given if tenant == tenant_id and text)
        for text, kept in _choose(session, tenant_id, asked, now).items():
            chosen[tenant_id, text] = kept
    return [
        structs.replace(event, labels=chosen[event.tenant_id, event.labels])
        if event.labels is not None
        else event
        for event in events
    ]


def known(session: Session, scope: TenantScope) -> list[str]:
    """Every set of the tenant, in order."""
    query = select(LabelSet.labels).where(LabelSet.tenant_id == scope.tenant_id)
    return list(session.scalars(query.order_by(LabelSet.labels)))


def names(session: Session, scope: TenantScope, most: int = 200) -> list[str]:
    """The first labels of the tenant's requests in order, such as `team=search`."""
    found = {label for text in known(session, scope) for label in text.split(",")}
    return sorted(found)[:most]


def matching(session: Session, scope: TenantScope, wanted: Sequence[str]) -> tuple[str, ...]:
    """The sets that have one of these labels of each name, such as `team=search`."""
    by_name: dict[str, set[str]] = {}
    for label in wanted:
        by_name.setdefault(label.partition("=")[0], set()).add(label)
    return tuple(
        text
        for text in known(session, scope)
        if all(some & set(text.split(",")) for some in by_name.values())
    )


def _choose(session: Session, tenant_id: str, asked: list[str], now: datetime) -> dict[str, str]:
    own = LabelSet.tenant_id == tenant_id
    there = set(session.scalars(select(LabelSet.labels).where(own, LabelSet.labels.in_(asked))))
    found = {text: text for text in asked if text in there}
    missing = [text for text in asked if text not in there]
    if not missing:
        return found
    room = _Room(session.scalars(select(LabelSet.labels).where(own)))
    for text in missing:
        found[text] = room.take(text)
    rows = [{"tenant_id": tenant_id, "labels": text, "first_at": now} for text in room.new]
    insert_new(session, _SETS, rows, "tenant_id", "labels")
    return found


class _Room:
    """What a tenant's sets leave of the bounds."""

    def __init__(self, known_sets: Iterable[str]) -> None:
        self.new: list[str] = []
        self._sets = set(known_sets)
        self._values: dict[str, set[str]] = {}
        for text in self._sets:
            self._note(labels.read(text))

    def take(self, text: str) -> str:
        """The set under which this one is counted."""
        parts = labels.read(text)
        for key, value in parts.items():
            values = self._values.setdefault(key, set())
            if value not in values and len(values) >= MOST_VALUES:
                parts[key] = labels.OTHER
        kept = labels.write(parts)
        if kept not in self._sets and len(self._sets) >= MOST_SETS:
            parts = dict.fromkeys(parts, labels.OTHER)
            kept = labels.write(parts)
        if kept not in self._sets:
            self._sets.add(kept)
            self._note(parts)
            self.new.append(kept)
        return kept

    def _note(self, parts: dict[str, str]) -> None:
        for key, value in parts.items():
            self._values.setdefault(key, set()).add(value)
