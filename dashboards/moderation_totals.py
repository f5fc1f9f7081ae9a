"""Moderation decisions of a tenant in a date range, from the daily counts."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from billing.usage.day_range import Range
from core.tenants.scope import TenantScope
from moderation import daily_counts

ACTIONS = ("annotate", "redact", "block")


@dataclass(slots=True)
class ModerationTotals:
    by_action: Counter[str] = field(default_factory=Counter)
    by_category: dict[str, Counter[str]] = field(default_factory=dict)  # category -> action -> n

    @property
    def flagged(self) -> int:
        return sum(self.by_action.values())

    def rows(self) -> list[dict[str, Any]]:
        """Most frequent category first. A decision with two categories counts in both."""
        ranked = sorted(self.by_category.items(), key=lambda pair: (-pair[1].total(), pair[0]))
        return [
            {"category": name, "total": counts.total(), **{a: counts[a] for a in ACTIONS}}
            for name, counts in ranked
        ]


def read(session: Session, scope: TenantScope, span: Range) -> ModerationTotals:
    found = ModerationTotals()
    for action, categories, number in daily_counts.counts_between(
        session, scope, span.start, span.end
    ):
        found.by_action[action] += number
        for category in categories or ["unscanned"]:
            found.by_category.setdefault(category, Counter())[action] += number
    return found
