"""The cost of stored usage that is not rated yet, so that budgets and wallets count it at once.

A batch of events never changes, so each is summed once and forgotten when it is rated. Sums are by
owner and quarter of an hour: in every zone local midnight is at one. Under tiers the cost is that of the
first usage of a period; rating replaces it by the exact one.
"""

from collections.abc import Mapping, Set
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from billing.pricing.pricing import Counts, PriceBook, counted, parts_of
from billing.usage.event_components import decode_components
from billing.usage.tables import UsageBatch, UsageEventRow
from core import labels
from core.database import epoch_bucket
from core.events import Components

_MOST = 5_000  # batches a statement
_E = UsageEventRow
_NO_PARTS = Components()


class Sum(NamedTuple):
    tenant_id: str
    project_id: str
    key_id: str
    currency: str
    at: datetime  # start of the quarter of an hour
    units: int  # picounits
    labels: str | None = None


class UnratedUsage:
    """Call `refresh` and `spent` in one snapshot, or an event is missed or counted twice."""

    def __init__(self) -> None:
        self._batches: dict[int, list[Sum]] = {}
        self._tenants: frozenset[str] = frozenset()

    def refresh(self, session: Session, tenants: frozenset[str], book: PriceBook) -> None:
        """Sum what these tenants' waiting batches cost."""
        if not tenants <= self._tenants:
            self._batches = {}
        self._tenants = tenants
        waiting = session.scalars(select(UsageBatch.id).where(UsageBatch.rated_at.is_(None)))
        known = self._batches
        self._batches = {batch: known.get(batch, []) for batch in waiting}
        new = sorted(self._batches.keys() - known.keys())
        for start in range(0, len(new), _MOST):
            self._add(session, new[start : start + _MOST], book)

    def spent(
        self,
        scopes: Mapping[str, Set[str]],
        currency: str,
        start: datetime | None = None,
        end: datetime | None = None,
        label: str = "",
    ) -> int:
        """Picounits of the usage whose tenant_id, project_id or key_id are among those of `scopes`, and
        that has the label, if one is given."""
        return sum(
            each.units
            for sums in self._batches.values()
            for each in sums
            if each.currency == currency
            and all(getattr(each, name) in values for name, values in scopes.items())
            and (start is None or each.at >= start)
            and (end is None or each.at < end)
            and (not label or labels.has(each.labels, label))
        )

    def _add(self, session: Session, batches: list[int], book: PriceBook) -> None:
        quarter = epoch_bucket(_E.occurred_at, session.get_bind().dialect.name, 900)
        answered = case((_E.status >= 500, 0), else_=_E.quantity)
        by = (
            *(_E.batch_id, _E.tenant_id, _E.project_id, _E.key_id, _E.kind, _E.price_version),
            *(_E.adapter.is_not(None), _E.components),
            quarter,
            _E.labels,
        )
        counts = (_E.input_tokens, _E.cached_tokens, _E.output_tokens, _E.waived_tokens)
        measured = (func.count(), *(func.sum(each) for each in counts))
        measured += (func.sum(answered), func.sum(_E.quantity), func.sum(_E.units))
        rows = session.execute(
            select(*by, *measured)
            .where(_E.batch_id.in_(batches), _E.tenant_id.in_(self._tenants))
            .group_by(*by)
        )
        for batch, tenant, project, key, kind, version_id, *of_event in rows:
            adapter, components, at, text, *sums = of_event
            version = book.by_id.get(version_id)
            if version is None:
                continue  # it will be parked
            events, given, cached, delivered, waived, answers, quantity, units = map(int, sums)
            parts = decode_components(components) if components else _NO_PARTS
            used = counted(
                kind,
                (
                    given - events * parts.input_tokens,
                    cached,
                    delivered - events * parts.output_tokens,
                    waived,
                ),
                answered=answers,
                adapter=bool(adapter),
                quantity=quantity,
                units=units,
            )
            divided = tuple((each, events * count) for each, count in parts_of(parts))
            cost = version.cost(Counts(used, divided))
            begins = datetime.fromtimestamp(int(at), UTC)
            owner = tenant, project, key, version.currency
            self._batches[batch].append(Sum(*owner, begins, cost, text))
