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
    adjusted: dict[tuple[str, datetime], int] = field(default_factory=dict)

    def saw(self, event: UsageEvent) -> None:
        self.events[event.request_id] = event

    def correct(self, wrong: str, right: str, seen: Iterable[str]) -> None:
        """What was seen so far of one version is to cost what another says; the last word counts.
        The months in which there is some of it are priced anew as a whole.
        """
        seen = frozenset(seen)
        self.corrected[wrong] = (right, seen)
        hit = [e for e in self.events.values() if e.price_version == wrong and e.request_id in seen]
        for tenant, month in {(e.tenant_id, month_of(e.occurred_at)[0]) for e in hit}:
            there = [
                e
                for e in self._of(tenant)
                if month_of(e.occurred_at)[0] == month and e.request_id in seen
            ]
            meant = self._priced((e, self._meant(e)) for e in there)
            as_pinned = self._priced((e, e.price_version) for e in there)
            self.adjusted[(tenant, month)] = meant - as_pinned

    def _meant(self, event: UsageEvent) -> str:
        right, seen = self.corrected.get(event.price_version, ("", frozenset()))
        return right if event.request_id in seen else event.price_version

    def usage(self, tenant: str) -> int:
        """Picounits of all usage: the price of the whole quantity of each month, along its versions."""
        return self._priced((e, e.price_version) for e in self._of(tenant))

    def corrections(self, tenant: str) -> int:
        return sum(units for (who, _), units in self.adjusted.items() if who == tenant)

    def _of(self, tenant: str) -> list[UsageEvent]:
        return [event for event in self.events.values() if event.tenant_id == tenant]

    def _priced(self, events: Iterable[tuple[UsageEvent, str]]) -> int:
        """Versions follow each other in the order of `prices`, each where the one before ended."""
        quantities: dict[tuple[datetime, str], dict[str, int]] = defaultdict(
            lambda: dict.fromkeys(self.prices, 0)
        )
        for event, version in events:
            month = month_of(event.occurred_at)[0]
            for component, quantity in self._counts(event).items():
                quantities[(month, component)][version] += quantity
        total = 0
        for (_, component), by_version in quantities.items():
            whole, before = sum(by_version.values()), 0
            for version, quantity in by_version.items():
                total += self._part(version, component, (before, quantity, whole))
                before += quantity
        return total

    def _part(self, version: str, component: str, place: tuple[int, int, int]) -> int:
        before, quantity, whole = place
        written, discount = self.prices[version]
        if component not in written or quantity == 0:
            return 0
        rule = written[component]
        tokens = component in ("input", "cached_input", "output", "waived")
        if isinstance(rule, dict) and rule.get("scheme") == "volume":
            free = rule.get("free", 0)
            paid = sum(1 for unit in range(before, before + quantity) if unit >= free)
            tier = next(
                t for t in rule["tiers"] if t["up_to"] is None or max(0, whole - free) <= t["up_to"]
            )
            full = paid * Fraction(tier["price"]) / (MILLION if tokens else 1)
            return self._less(full, discount)
        upto = self._less(price_by_hand(rule, before + quantity, tokens), discount)
        return upto - self._less(price_by_hand(rule, before, tokens), discount)

    @staticmethod
    def _less(full: Fraction, discount: Fraction) -> int:
        units = full * 10**12
        assert units.denominator == 1
        return int(units) - int(units) * int(discount * MILLION) // MILLION

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
