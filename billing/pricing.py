"""What usage costs: pure functions of whole quantities and picounits, no database, no rounding.

The price of a quantity is a function of the whole quantity of a billing period, `Rate.total`. An
event costs the difference that it makes: total(before + quantity) - total(before). So the charges of
a period always sum to the price of its whole quantity, in whatever order the events came.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from types import MappingProxyType

from core.errors import NotFound
from core.events import UsageEvent, UsageKind

ANY = "*"
PPM = 1_000_000


class Component(StrEnum):
    INPUT = "input"  # uncached prompt tokens
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"  # delivered to the client
    WAIVED = "waived"  # generated, not delivered
    REQUEST = "request"
    ADAPTER = "adapter"  # a request that used an adapter
    GPU_SECOND = "gpu_second"
    MODERATION = "moderation"  # a call of the moderation endpoint


TOKENS = (Component.INPUT, Component.CACHED_INPUT, Component.OUTPUT, Component.WAIVED)


class Scheme(StrEnum):
    FLAT = "flat"
    GRADUATED = "graduated"  # each tier prices the part of the quantity within it
    VOLUME = "volume"  # the tier that the whole quantity reaches prices all of it
    PACKAGE = "package"  # whole packages, a begun one counts


@dataclass(frozen=True, slots=True)
class Tier:
    up_to: int | None  # last quantity of the tier; None has no end
    unit: int  # picounits a unit
    flat: int = 0  # picounits once the tier is entered


@dataclass(frozen=True, slots=True)
class Rate:
    scheme: Scheme
    tiers: tuple[Tier, ...]
    package: int = 1  # units a package
    free: int = 0  # units a period that cost nothing

    def total(self, quantity: int) -> int:
        """Picounits for the whole quantity of a period."""
        billable = max(0, quantity - self.free)
        if billable == 0:
            return 0
        if self.scheme is Scheme.FLAT:
            return billable * self.tiers[0].unit
        if self.scheme is Scheme.PACKAGE:
            return -(-billable // self.package) * self.tiers[0].unit
        if self.scheme is Scheme.VOLUME:
            reached = next(t for t in self.tiers if t.up_to is None or billable <= t.up_to)
            return reached.flat + billable * reached.unit
        return self._graduated(billable)

    def _graduated(self, billable: int) -> int:
        total, below = 0, 0
        for tier in self.tiers:
            top = billable if tier.up_to is None else min(billable, tier.up_to)
            if top > below:
                total += tier.flat + (top - below) * tier.unit
                below = top
        return total

    def most(self, quantity: int) -> int:
        """No quantity costs more than this, wherever on the tiers the tenant stands."""
        if quantity == 0:
            return 0
        if self.scheme is Scheme.PACKAGE:
            return (-(-quantity // self.package) + 1) * self.tiers[0].unit
        flats = sum(tier.flat for tier in self.tiers)
        return quantity * max(tier.unit for tier in self.tiers) + flats


@dataclass(frozen=True, slots=True)
class Counts:
    """What one event used, by component. `of_event` and `of_answer` are the only ways to make one."""

    by_component: tuple[tuple[Component, int], ...]

    @staticmethod
    def of_event(event: UsageEvent) -> "Counts":
        return Counts(
            counted(
                event.kind,
                event.input_tokens,
                event.cached_tokens,
                event.output_tokens,
                event.waived_tokens,
                bool(event.adapter),
                event.quantity,
                event.status,
            )
        )

    @staticmethod
    def of_answer(
        input_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        waived_tokens: int = 0,
        *,
        adapter: bool = False,
        status: int = 200,
    ) -> "Counts":
        return Counts(
            counted(
                UsageKind.GENERATION,
                input_tokens,
                cached_tokens,
                output_tokens,
                waived_tokens,
                adapter,
                1,
                status,
            )
        )


def counted(
    kind: str,
    input_tokens: int,
    cached_tokens: int,
    output_tokens: int,
    waived_tokens: int,
    adapter: bool,
    quantity: int,
    status: int,
) -> tuple[tuple[Component, int], ...]:
    """Quantities by component. A fault of ours (5xx) costs no fee; tokens count as delivered."""
    if kind == UsageKind.GPU_SECONDS:
        return ((Component.GPU_SECOND, quantity),)
    fee = 0 if status >= 500 else quantity
    if kind == UsageKind.MODERATION:
        return ((Component.MODERATION, fee),)
    return (
        (Component.INPUT, input_tokens - cached_tokens),
        (Component.CACHED_INPUT, cached_tokens),
        (Component.OUTPUT, output_tokens),
        (Component.WAIVED, waived_tokens),
        (Component.REQUEST, fee),
        (Component.ADAPTER, fee if adapter else 0),
    )


@dataclass(frozen=True)
class PriceVersion:
    """Terms of one price. `id` is pinned on a request at admission, and rating uses no other."""

    id: str
    currency: str
    rates: MappingProxyType[Component, Rate]  # a component without a rate is free
    discount_ppm: int = 0
    tenant_id: str = ""  # "" is the list price
    model: str = ANY
    adapter: str = ANY
    effective_from: datetime | None = None
    effective_to: datetime | None = None

    def total(self, component: Component, quantity: int) -> int:
        """Picounits for the whole quantity of a period, with the discount off."""
        rate = self.rates.get(component)
        if rate is None:
            return 0
        full = rate.total(quantity)
        return full - full * self.discount_ppm // PPM

    def marginal(self, component: Component, before: int, quantity: int) -> int:
        return self.total(component, before + quantity) - self.total(component, before)

    @cached_property
    def linear(self) -> MappingProxyType[Component, int]:
        """Picounits a unit, of the components whose price does not depend on what came before."""
        found = {}
        for component, rate in self.rates.items():
            kept = rate.tiers[0].unit * (PPM - self.discount_ppm)
            if rate.scheme is Scheme.FLAT and rate.free == 0 and kept % PPM == 0:
                found[component] = kept // PPM
        return MappingProxyType(found)

    def cost(self, counts: Counts) -> int:
        """Picounits of an event that is the first of its period; exact always if prices are flat."""
        total = 0
        for component, quantity in counts.by_component:
            if quantity:  # none of it costs nothing, whatever the rate
                total += self.total(component, quantity)
        return total

    def upper_bound(
        self, prompt_tokens: int, max_output_tokens: int, *, adapter: bool = True
    ) -> int:
        """Picounits that a request can cost at most, whatever is cached or waived: the hold."""
        rates = self.rates
        total = _dearer(
            prompt_tokens, rates.get(Component.INPUT), rates.get(Component.CACHED_INPUT)
        )
        total += _dearer(
            max_output_tokens, rates.get(Component.OUTPUT), rates.get(Component.WAIVED)
        )
        total += _dearer(1, rates.get(Component.REQUEST), None)
        return total + (_dearer(1, rates.get(Component.ADAPTER), None) if adapter else 0)


def _dearer(quantity: int, one: Rate | None, other: Rate | None) -> int:
    """The most that a quantity costs when any part of it may fall under either rate."""
    known = [rate for rate in (one, other) if rate is not None]
    if quantity == 0 or not known:
        return 0
    if all(rate.scheme is Scheme.FLAT for rate in known):
        return max(rate.most(quantity) for rate in known)
    return sum(rate.most(quantity) for rate in known)


@dataclass(frozen=True)
class PriceBook:
    """An immutable snapshot of all versions."""

    versions: tuple[PriceVersion, ...]

    @cached_property
    def by_id(self) -> dict[str, PriceVersion]:
        return {version.id: version for version in self.versions}

    @cached_property
    def _by_scope(self) -> dict[tuple[str, str, str], list[PriceVersion]]:
        found: dict[tuple[str, str, str], list[PriceVersion]] = {}
        for version in self.versions:
            found.setdefault((version.tenant_id, version.model, version.adapter), []).append(
                version
            )
        return found

    def pin(self, tenant_id: str, model: str, adapter: str | None, at: datetime) -> PriceVersion:
        """The most particular version in force: the tenant's before the list, the model's and the
        adapter's before `*`. NotFound with the next step where there is none.
        """
        adapters = (adapter, ANY) if adapter else (ANY,)
        for tenant in (tenant_id, ""):
            for of_model in (model, ANY):
                for of_adapter in adapters:
                    for version in self._by_scope.get((tenant, of_model, of_adapter), ()):
                        if in_force(version.effective_from, version.effective_to, at):
                            return version
        raise NotFound(
            f"No price is in force for model {model!r}.",
            next_step=f"Set one: tollhouse price set --model {model} --input … --output …",
            code="no_price",
        )


def in_force(start: datetime | None, end: datetime | None, at: datetime) -> bool:
    return (start is None or start <= at) and (end is None or at < end)
