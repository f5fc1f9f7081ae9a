"""Billing as one would do it by hand, slowly: one unit after the other, everything kept in lists."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

from core.events import UsageEvent

MILLION = 1_000_000


def price_by_hand(written: Any, quantity: int, per_million: bool) -> Fraction:
    """Major units for a quantity, walked through unit by unit, from the written form of a price."""
    rule = written if isinstance(written, dict) else {"scheme": "flat", "price": written}
    per = MILLION if per_million else 1
    billable = max(0, quantity - rule.get("free", 0))
    scheme = rule.get("scheme", "flat")
    if scheme == "flat":
        return sum((Fraction(rule["price"]) / per for _ in range(billable)), Fraction(0))
    if scheme == "package":
        begun, total = 0, Fraction(0)
        for unit in range(billable):
            if unit % rule["size"] == 0:
                begun += 1
                total += Fraction(rule["price"])
        return total
    tiers = rule["tiers"]
    if scheme == "volume":
        if billable == 0:
            return Fraction(0)
        reached = next(t for t in tiers if t["up_to"] is None or billable <= t["up_to"])
        return Fraction(reached["price"]) / per * billable
    total, entered = Fraction(0), set()
    for unit in range(1, billable + 1):
        number, tier = next(
            (n, t) for n, t in enumerate(tiers) if t["up_to"] is None or unit <= t["up_to"]
        )
        if number not in entered:
            entered.add(number)
            total += Fraction(tier.get("flat", "0"))
        total += Fraction(tier["price"]) / per
    return total


def month_of(at: datetime) -> tuple[datetime, datetime]:
    start = datetime(at.year, at.month, 1, tzinfo=UTC)
    after = (at.year + 1, 1) if at.month == 12 else (at.year, at.month + 1)
    return start, datetime(*after, 1, tzinfo=UTC)


@dataclass
class ByHand:
    """Every event once, the price that was pinned on it, and what each tenant owes at the end."""

    prices: dict[str, tuple[dict[str, Any], Fraction]] = field(default_factory=dict)
    events: dict[str, UsageEvent] = field(default_factory=dict)
    plans: dict[str, list[tuple[datetime, dict[str, int], int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    corrected: dict[str, tuple[str, frozenset[str]]] = field(default_factory=dict)

    def saw(self, event: UsageEvent) -> None:
        self.events[event.request_id] = event

    def correct(self, wrong: str, right: str, seen: Iterable[str]) -> None:
        """What was seen so far of one version is to cost what another says; the last word counts."""
        self.corrected[wrong] = (right, frozenset(seen))

    def usage(self, tenant: str) -> int:
        """Picounits of all usage: the price of the whole quantity of each month and version."""
        return self._priced((e, e.price_version) for e in self._of(tenant))

    def corrections(self, tenant: str) -> int:
        total = 0
        for wrong, (right, seen) in self.corrected.items():
            those = [
                e for e in self._of(tenant) if e.price_version == wrong and e.request_id in seen
            ]
            total += self._priced((e, right) for e in those)
            total -= self._priced((e, wrong) for e in those)
        return total

    def _of(self, tenant: str) -> list[UsageEvent]:
        return [event for event in self.events.values() if event.tenant_id == tenant]

    def _priced(self, events: Iterable[tuple[UsageEvent, str]]) -> int:
        quantities: dict[tuple[datetime, str, str], int] = defaultdict(int)
        for event, version in events:
            month = month_of(event.occurred_at)[0]
            for component, quantity in self._counts(event).items():
                quantities[(month, version, component)] += quantity
        total = 0
        for (_, version, component), quantity in quantities.items():
            written, discount = self.prices[version]
            if component not in written:
                continue
            tokens = component in ("input", "cached_input", "output", "waived")
            full = price_by_hand(written[component], quantity, tokens) * 10**12
            assert full.denominator == 1
            total += int(full) - int(full) * int(discount * MILLION) // MILLION
        return total

    @staticmethod
    def _counts(event: UsageEvent) -> dict[str, int]:
        return {
            "input": event.input_tokens - event.cached_tokens,
            "cached_input": event.cached_tokens,
            "output": event.output_tokens,
            "waived": event.waived_tokens,
            "request": 0 if event.status >= 500 else 1,
            "adapter": 1 if event.adapter and event.status < 500 else 0,
        }

    def fees(self, tenant: str, until: datetime) -> Fraction:
        """Base fees and seats of every month that ended, by the share of its time."""
        total = Fraction(0)
        changes = self.plans[tenant]
        for number, (start, plan, seats) in enumerate(changes):
            end = changes[number + 1][0] if number + 1 < len(changes) else until
            at = start
            while at < end:
                first, after = month_of(at)
                upto = min(end, after)
                if after <= until:
                    share = Fraction(
                        int((upto - at).total_seconds() * 10**6),
                        int((after - first).total_seconds() * 10**6),
                    )
                    extra = max(0, seats - plan["included_seats"])
                    total += share * (plan["base_fee"] + extra * plan["seat_fee"])
                at = upto
        return total
