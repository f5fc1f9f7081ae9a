"""State of the fake server: objects by kind, events, and the behaviour of test cards."""

import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from billing.payments.fake_stripe.objects import ApiError, Maker, Object, listing
from core.clock import Clock, SystemClock

# Decline code and message by a card's last four digits, as Stripe's test cards.
DECLINES = {
    "0341": ("card_declined", "Your card was declined."),
    "9995": ("card_declined", "Your card has insufficient funds."),
    "0069": ("expired_card", "Your card has expired."),
}


@dataclass
class StripeState:
    clock: Clock = field(default_factory=SystemClock)
    objects: dict[str, dict[str, Object]] = field(default_factory=dict)
    events: list[Object] = field(default_factory=list)
    identifiers: dict[str, datetime] = field(
        default_factory=dict
    )  # meter event identifier -> time received
    declines: dict[str, tuple[str, str]] = field(default_factory=lambda: dict(DECLINES))
    cash: dict[str, int] = field(default_factory=dict)  # customer -> cash balance
    tax_rates: list[Any] = field(default_factory=list)  # taxes.Rate
    tax_origin: str = "DE"  # the seller's country
    maker: Maker = field(default_factory=Maker)

    @property
    def now(self) -> int:
        return int(self.clock.now().timestamp())

    def make(self, kind: str, **fields: Any) -> Object:
        made = self.maker.make(kind, self.now, **fields)
        return self.objects.setdefault(kind, {}).setdefault(made["id"], made)

    def get(self, kind: str, name: str) -> Object:
        found = self.objects.get(kind, {}).get(name)
        if found is None:
            raise ApiError(404, f"No such {kind}: '{name}'", code="resource_missing", param="id")
        return found

    def all(self, kind: str, **wanted: Any) -> list[Object]:
        """Matching objects, newest first, as Stripe lists them."""
        chosen = {name: value for name, value in wanted.items() if value is not None}
        found = [
            each
            for each in self.objects.get(kind, {}).values()
            if all(each.get(name) == value for name, value in chosen.items())
        ]
        return found[::-1]

    def page(self, kind: str, url: str, query: dict[str, Any], *filters: str) -> Object:
        made = query.get("created") or {}
        since, until = int(made.get("gte", 0)), int(made.get("lt", 1 << 62))
        found = self.all(kind, **{name: query.get(name) for name in filters})
        found = [each for each in found if since <= each.get("created", since) < until]
        after = query.get("starting_after")
        if after is not None:
            names = [each["id"] for each in found]
            found = found[names.index(after) + 1 :] if after in names else []
        size = int(query.get("limit") or 10)
        return listing(url, found[:size], has_more=len(found) > size)

    def emit(self, kind: str, about: Object) -> Object:
        """Record an event with a copy of the object."""
        event = self.maker.make(
            "event",
            self.now,
            type=kind,
            data={"object": copy.deepcopy(about)},
            api_version="2026-10-28.endive",
            pending_webhooks=1,
            request={"id": None, "idempotency_key": None},
        )
        self.events.append(event)
        return event

    def decline_of(self, method: Object | None) -> tuple[str, str] | None:
        """(code, message) if charging the card fails, else None."""
        if method is None:
            return "missing", "There is no payment method to charge."
        return self.declines.get(method["card"]["last4"]) if method["type"] == "card" else None
