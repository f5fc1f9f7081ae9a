"""Prices of usage: pure functions on whole quantities and picounits, without database or rounding.

`Rate.total` prices the total quantity of a billing period. An event costs the increase that it
causes: total(before + quantity) - total(before). The charges of a period therefore sum to the price
of its total quantity, in any order of events.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from itertools import chain, product
from types import MappingProxyType

from core.errors import NotFound
from core.events import Components, UsageEvent, UsageKind

ANY = "*"
CACHED = "@cache"  # behind a model's name: the price of its answers from the response cache
TIERS = ("priority", "flex")  # behind a model's name and `@`: the price of a service tier
BATCH = "@batch"  # behind a model's name: the price of lines of a batch
LONG = "@above-"  # and a number: the price of requests whose prompt has more tokens
PPM = 1_000_000
MAX_COUNT = (
    10**15
)  # of an event, free units, a package or a tier; 64 bits hold the sums of thousands
_MAX_RANKED = 20_000  # combinations of tenant, model, adapter and currency


class Component(StrEnum):
    INPUT = "input"  # uncached prompt tokens
    CACHED_INPUT = "cached_input"
    OUTPUT = "output"  # delivered to the client
    WAIVED = "waived"  # generated, not delivered
    REQUEST = "request"
    ADAPTER = "adapter"  # requests that used an adapter
    GPU_SECOND = "gpu_second"
    MODERATION = "moderation"  # calls of the moderation endpoint
    AUDIO_SECOND = "audio_second"  # of transcribed or translated audio
    IMAGE = "image"
    CHARACTER = "character"  # of text that was spoken
    # Parts of a provider's usage, as `core.events.Components` names them.
    CACHE_WRITE_5M = "cache_write_5m"
    CACHE_WRITE_1H = "cache_write_1h"
    AUDIO_INPUT = "audio_input"
    IMAGE_INPUT = "image_input"
    REASONING = "reasoning"
    AUDIO_OUTPUT = "audio_output"
    IMAGE_OUTPUT = "image_output"
    SEARCH = "search"
    TOOL_CALL = "tool_call"


# What a part costs where a price has no rate for it: what this component costs. A search or a call
# without a rate is free.
PRICED_AS: Mapping[Component, Component] = {
    Component.CACHE_WRITE_1H: Component.CACHE_WRITE_5M,
    Component.CACHE_WRITE_5M: Component.INPUT,
    Component.AUDIO_INPUT: Component.INPUT,
    Component.IMAGE_INPUT: Component.INPUT,
    Component.REASONING: Component.OUTPUT,
    Component.AUDIO_OUTPUT: Component.OUTPUT,
    Component.IMAGE_OUTPUT: Component.OUTPUT,
}
PARTS = (
    Component.CACHE_WRITE_5M,
    Component.CACHE_WRITE_1H,
    Component.AUDIO_INPUT,
    Component.IMAGE_INPUT,
    Component.REASONING,
    Component.AUDIO_OUTPUT,
    Component.IMAGE_OUTPUT,
    Component.SEARCH,
    Component.TOOL_CALL,
)
TOKENS = (
    Component.INPUT,
    Component.CACHED_INPUT,
    Component.OUTPUT,
    Component.WAIVED,
    *PRICED_AS,
)
PER_MILLION = (*TOKENS, Component.CHARACTER)  # the components whose written price is per million
# The component that `UsageEvent.units` counts.
UNIT_OF: Mapping[str, Component] = {
    UsageKind.AUDIO: Component.AUDIO_SECOND,
    UsageKind.SPEECH: Component.CHARACTER,
    UsageKind.IMAGE: Component.IMAGE,
}


class Scheme(StrEnum):
    FLAT = "flat"
    GRADUATED = "graduated"  # each tier prices the part of the quantity inside it
    VOLUME = "volume"  # the tier of the total quantity prices all of it
    PACKAGE = "package"  # whole packages; a started one counts


@dataclass(frozen=True, slots=True)
class Tier:
    up_to: int | None  # last quantity of the tier; None is unbounded
    unit: int  # picounits per unit
    flat: int = 0  # picounits charged once when the tier is reached


@dataclass(frozen=True, slots=True)
class Rate:
    scheme: Scheme
    tiers: tuple[Tier, ...]
    package: int = 1  # units per package
    free: int = 0  # free units per period

    @property
    def is_linear(self) -> bool:
        """Whether each unit costs the same, whatever was used before."""
        return self.scheme is Scheme.FLAT and self.free == 0

    def total(self, quantity: int) -> int:
        """Picounits for the total quantity of a period."""
        billable = max(0, quantity - self.free)
        if billable == 0:
            return 0
        if self.scheme is Scheme.FLAT:
            return billable * self.tiers[0].unit
        if self.scheme is Scheme.PACKAGE:
            return -(-billable // self.package) * self.tiers[0].unit
        if self.scheme is Scheme.VOLUME:
            reached = self._reached(billable)
            return reached.flat + billable * reached.unit
        return self._graduated(billable)

    def volume_part(self, before: int, quantity: int, whole: int) -> int:
        """Picounits for `quantity` after `before` others, in the volume tier of the whole."""
        billable = max(0, before + quantity - self.free) - max(0, before - self.free)
        return billable * self._reached(max(0, whole - self.free)).unit

    def _reached(self, billable: int) -> Tier:
        return next(t for t in self.tiers if t.up_to is None or billable <= t.up_to)

    def _graduated(self, billable: int) -> int:
        total, below = 0, 0
        for tier in self.tiers:
            top = billable if tier.up_to is None else min(billable, tier.up_to)
            if top > below:
                total += tier.flat + (top - below) * tier.unit
                below = top
        return total

    def most(self, quantity: int) -> int:
        """Upper bound in picounits for a quantity, at any position on the tiers."""
        if quantity == 0:
            return 0
        if self.scheme is Scheme.PACKAGE:
            return -(-quantity // self.package) * self.tiers[0].unit
        flats = sum(tier.flat for tier in self.tiers)
        return quantity * max(tier.unit for tier in self.tiers) + flats


# A look-up in an enumeration costs as much as ten in a module, and each request counts twice.
_GPU_SECONDS, _MODERATION = UsageKind.GPU_SECONDS, UsageKind.MODERATION
_INPUT, _CACHED, _OUTPUT = Component.INPUT, Component.CACHED_INPUT, Component.OUTPUT
_WAIVED, _REQUEST, _ADAPTER = Component.WAIVED, Component.REQUEST, Component.ADAPTER


@dataclass(frozen=True, slots=True)
class Counts:
    """Quantities of one event by component. Create it with `of_event` or `of_answer`. What `parts`
    have, input and output do not have again."""

    by_component: tuple[tuple[Component, int], ...]
    parts: tuple[tuple[Component, int], ...] = ()

    @staticmethod
    def of_event(event: UsageEvent) -> "Counts":
        parts = event.components
        used = counted(
            event.kind,
            (
                event.input_tokens - (parts.input_tokens if parts is not None else 0),
                event.cached_tokens,
                event.output_tokens - (parts.output_tokens if parts is not None else 0),
                event.waived_tokens,
            ),
            answered=0 if event.status >= 500 else event.quantity,
            adapter=bool(event.adapter),
            quantity=event.quantity,
            units=event.units,
        )
        return Counts(used) if parts is None else Counts(used, parts_of(parts))

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
                (input_tokens, cached_tokens, output_tokens, waived_tokens),
                answered=0 if status >= 500 else 1,
                adapter=adapter,
            )
        )


def parts_of(parts: Components) -> tuple[tuple[Component, int], ...]:
    """Quantities of those that are there."""
    return tuple(
        (component, count) for component in PARTS if (count := getattr(parts, component.value))
    )


def priced_as(rates: Mapping[Component, Rate], component: Component) -> Component:
    """The component whose rate prices this one."""
    while component not in rates and component in PRICED_AS:
        component = PRICED_AS[component]
    return component


def priced_quantities(
    rates: Mapping[Component, Rate], used: Iterable[tuple[Component, int]]
) -> dict[Component, int]:
    """Quantities by the component that prices them: parts without a rate count to what has one."""
    found: dict[Component, int] = {}
    for component, quantity in used:
        priced = priced_as(rates, component) if quantity else component
        found[priced] = found.get(priced, 0) + quantity
    return found


def counted(
    kind: str,
    tokens: tuple[int, int, int, int],
    *,
    answered: int,
    adapter: bool,
    quantity: int = 1,
    units: int = 0,
) -> tuple[tuple[Component, int], ...]:
    """Quantities by component. `tokens` are input with cached, cached, output and waived tokens;
    `answered` requests pay a fee and what was waived of them, where that has a price; those with a 5xx
    status do not. Delivered tokens count always, and so do the `units` of audio, speech and images.
    """
    if kind == _GPU_SECONDS:
        return ((Component.GPU_SECOND, quantity),)
    if kind == _MODERATION:
        return ((Component.MODERATION, answered),)
    input_tokens, cached_tokens, output_tokens, waived_tokens = tokens
    found = (
        (_INPUT, input_tokens - cached_tokens),
        (_CACHED, cached_tokens),
        (_OUTPUT, output_tokens),
        (_WAIVED, waived_tokens if answered else 0),
        (_REQUEST, answered),
        (_ADAPTER, answered if adapter else 0),
    )
    return (*found, (UNIT_OF[kind], units)) if units and kind in UNIT_OF else found


@dataclass(frozen=True)
class PriceVersion:
    """The terms of one price. Admission pins `id` on a request, and rating uses that version."""

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
        """Picounits for the total quantity of a period, after the discount."""
        rate = self.rates.get(component)
        if rate is None:
            return 0
        full = rate.total(quantity)
        return full - full * self.discount_ppm // PPM

    def marginal(self, component: Component, before: int, quantity: int) -> int:
        return self.total(component, before + quantity) - self.total(component, before)

    def part(self, component: Component, before: int, quantity: int, whole: int) -> int:
        """Picounits for `quantity` after `before` others of a period, `whole` in all. A volume tier
        is that of the whole; any other tier is reached in turn.
        """
        rate = self.rates.get(component)
        if rate is None or rate.scheme is not Scheme.VOLUME:
            return self.marginal(component, before, quantity)
        full = rate.volume_part(before, quantity, whole)
        return full - full * self.discount_ppm // PPM

    @cached_property
    def linear(self) -> MappingProxyType[Component, int]:
        """Picounits per unit of the components whose price does not depend on earlier usage."""
        found = {}
        for component, rate in self.rates.items():
            kept = rate.tiers[0].unit * (PPM - self.discount_ppm)
            if rate.is_linear and kept % PPM == 0:
                found[component] = kept // PPM
        return MappingProxyType(found)

    def cost(self, counts: Counts) -> int:
        """Picounits of an event as the first of its period; exact for any event if rates are flat."""
        total, linear = 0, self.linear
        for component, quantity in self.priced(counts):
            if quantity:  # a quantity of zero costs nothing at any rate
                unit = linear.get(component)
                total += self.total(component, quantity) if unit is None else quantity * unit
        return total

    def most_for(self, counts: Counts) -> int:
        """The most picounits that these quantities can cost, at any position on the tiers."""
        return sum(
            _max_cost(quantity, self.rates.get(component))
            for component, quantity in self.priced(counts)
        )

    def priced(self, counts: Counts) -> Iterable[tuple[Component, int]]:
        """Quantities by the component whose rate prices them."""
        if not counts.parts:
            return counts.by_component
        return priced_quantities(self.rates, (*counts.by_component, *counts.parts)).items()

    def upper_bound(
        self, prompt_tokens: int, max_output_tokens: int, *, adapter: bool = True
    ) -> int:
        """The most picounits a request can cost, however many tokens are cached, written into a cache,
        reasoning, of another modality or waived. Searches and calls of tools are not in it: nobody
        knows how many a provider will make."""
        rates = self.rates
        total = _max_cost(prompt_tokens, *map(rates.get, _OF_INPUT))
        total += _max_cost(max_output_tokens, *map(rates.get, _OF_OUTPUT))
        total += _max_cost(1, rates.get(Component.REQUEST))
        return total + (_max_cost(1, rates.get(Component.ADAPTER)) if adapter else 0)


_OF_INPUT = (
    *(Component.INPUT, Component.CACHED_INPUT, Component.CACHE_WRITE_5M, Component.CACHE_WRITE_1H),
    *(Component.AUDIO_INPUT, Component.IMAGE_INPUT),
)
_OF_OUTPUT = (
    *(Component.OUTPUT, Component.WAIVED, Component.REASONING),
    *(Component.AUDIO_OUTPUT, Component.IMAGE_OUTPUT),
)


def _max_cost(quantity: int, *rates: Rate | None) -> int:
    """The most a quantity can cost when any part of it may be priced by any of the rates."""
    known = [rate for rate in rates if rate is not None]
    if quantity == 0 or not known:
        return 0
    if all(rate.scheme is Scheme.FLAT for rate in known):
        return max(rate.most(quantity) for rate in known)
    return sum(rate.most(quantity) for rate in known)


@dataclass(frozen=True)
class PriceBook:
    """An immutable snapshot of all price versions."""

    versions: tuple[PriceVersion, ...]

    @cached_property
    def by_id(self) -> dict[str, PriceVersion]:
        return {version.id: version for version in self.versions}

    @cached_property
    def _by_scope(self) -> dict[tuple[str, str, str, str], list[PriceVersion]]:
        found: dict[tuple[str, str, str, str], list[PriceVersion]] = {}
        for version in self.versions:
            scope = (version.currency, version.tenant_id, version.model, version.adapter)
            found.setdefault(scope, []).append(version)
        return found

    def pin(
        self, tenant_id: str, model: str, adapter: str | None, at: datetime, currency: str
    ) -> PriceVersion:
        """The most specific version in this currency in force: the tenant's before the list price,
        the model's and the adapter's before `*`. Raises NotFound if there is none.
        """
        for version in self._by_rank(tenant_id, model, adapter, currency):
            if in_force(version.effective_from, version.effective_to, at):
                return version
        raise NotFound(
            f"No price is in force for model {model!r} in {currency}.",
            next_step=f"Set one: tollhouse price set --model {model} --currency {currency} "
            "--input … --output …",
            code="no_price",
        )

    def _by_rank(
        self, tenant_id: str, model: str, adapter: str | None, currency: str
    ) -> tuple[PriceVersion, ...]:
        """The versions that may apply at some time, the most specific ones first."""
        asked = (tenant_id, model, adapter, currency)
        found = self._ranked.get(asked)
        if found is None:
            if len(self._ranked) >= _MAX_RANKED:
                self._ranked.clear()
            adapters = (adapter, ANY) if adapter else (ANY,)
            scopes = product((currency,), (tenant_id, ""), (model, ANY), adapters)
            listed = [self._by_scope.get(scope, ()) for scope in scopes]
            found = self._ranked[asked] = tuple(chain.from_iterable(listed))
        return found

    @cached_property
    def _ranked(self) -> dict[tuple[str, str, str | None, str], tuple[PriceVersion, ...]]:
        return {}

    def pin_cached(
        self, tenant_id: str, model: str, adapter: str | None, at: datetime, currency: str
    ) -> PriceVersion:
        """The version for an answer from the response cache: that of `<model>@cache` or `*@cache`,
        else the one of the model itself, whose fee per request applies."""
        found = self._pin_suffixed(CACHED, tenant_id, model, at, currency)
        return found or self.pin(tenant_id, model, adapter, at, currency)

    def pin_tier(
        self, tenant_id: str, model: str, tier: str, at: datetime, currency: str
    ) -> PriceVersion | None:
        """The version for a service tier: that of `<model>@<tier>` or `*@<tier>`. It holds for the
        model's adapters, too. None where the tier has no price."""
        if tier not in TIERS:
            return None
        return self._pin_suffixed(f"@{tier}", tenant_id, model, at, currency)

    def pin_batch(
        self, tenant_id: str, model: str, at: datetime, currency: str
    ) -> PriceVersion | None:
        """The version for lines of a batch; None where they cost what other requests cost."""
        return self._pin_suffixed(BATCH, tenant_id, model, at, currency)

    def pin_long(
        self, tenant_id: str, model: str, prompt_tokens: int, at: datetime, currency: str
    ) -> PriceVersion | None:
        """The version for prompts of more tokens than the largest bound that this one exceeds; None
        where it exceeds none."""
        for bound in self._bounds:
            if prompt_tokens > bound:
                found = self._pin_suffixed(f"{LONG}{bound}", tenant_id, model, at, currency)
                if found is not None:
                    return found
        return None

    @cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Of all models, largest first."""
        ends = {version.model.partition(LONG)[2] for version in self.versions}
        return tuple(
            sorted((int(end) for end in ends if end.isascii() and end.isdecimal()), reverse=True)
        )

    def _pin_suffixed(
        self, suffix: str, tenant_id: str, model: str, at: datetime, currency: str
    ) -> PriceVersion | None:
        for name in (f"{model}{suffix}", f"{ANY}{suffix}"):
            for tenant in (tenant_id, ""):
                for version in self._by_scope.get((currency, tenant, name, ANY), ()):
                    if in_force(version.effective_from, version.effective_to, at):
                        return version
        return None

    def pin_from(
        self, tenant_id: str, model: str, adapter: str | None, at: datetime, currency: str
    ) -> PriceVersion | None:
        """As `pin`; if none was in force, the first that came into force after `at`. None without one."""
        starts = {
            version.effective_from
            for version in self.versions
            if version.currency == currency and version.effective_from is not None
        }
        for moment in (at, *sorted(start for start in starts if start > at)):
            try:
                return self.pin(tenant_id, model, adapter, moment, currency)
            except NotFound:
                continue
        return None


def tier_of(model: str) -> str:
    """What follows `@` in the name of a price that holds for some requests alone; "" in others."""
    _, at, tier = model.rpartition("@")
    known = f"@{tier}" in (CACHED, BATCH) or tier in TIERS or f"@{tier}".startswith(LONG)
    return tier if at and known else ""


def in_force(start: datetime | None, end: datetime | None, at: datetime) -> bool:
    return (start is None or start <= at) and (end is None or at < end)
