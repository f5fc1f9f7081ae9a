"""Limits and the budget hold: one atomic reservation before the work, one settlement after it.

`reserve` checks this process's concurrency limit first, then the counters. Over a limit it waits in
the plan's queue or refuses. Every outcome of a request ends in `settle` or `release`, once.
"""

import asyncio
import logging

from msgspec.structs import replace

from billing.pricing.pricing import Counts
from core import metrics
from core.clock import Clock
from core.counters import PICO_PER_NANO, Counters, Denial, nano_ceil
from core.errors import DependencyDown, TollhouseError
from gateway.admission.estimates import OutputEstimates
from gateway.admission.leases import FailoverCounters, Leases, counters_down
from gateway.admission.overshoot import Overshoot
from gateway.admission.prices import CostBounds, PriceList
from gateway.admission.queue import ConcurrencyLimiter, TenantQueues
from gateway.admission.rejections import (
    RejectionCounter,
    out_of_money_error,
    over_limit_error,
    too_large_error,
)
from gateway.admission.request import UNUSED, AdmissionRequest, ServedRequest, SettledUsage
from gateway.admission.request_rate import RequestRate
from gateway.admission.reservation import (
    NO_LIMIT,
    Reservation,
    bucket_amounts,
    output_tokens_covered,
    plan_buckets,
)
from gateway.admission.seeding import Seeding
from gateway.admission.service_tiers import in_tier

log = logging.getLogger("tollhouse.admission")
_EXTEND_ATTEMPTS = 10
MIN_RECORDED_WAIT_MS = 20  # less is the round trip to the counters, not a queue
_EXTEND_PAUSE_S = 0.1


class Limiter:
    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        *,
        when_down: str = "closed",
        processes: int = 1,
        max_in_flight: int = 0,
        rejections: RejectionCounter | None = None,
    ) -> None:
        """In mode `local` each of `processes` gets an equal share of the limits while Redis is down.
        `max_in_flight` 0 disables the concurrency limit."""
        self._counters = FailoverCounters(counters, clock, mode=when_down, processes=processes)
        self.request_rate = RequestRate(self._counters)
        self._clock = clock
        self._estimates = OutputEstimates()
        self._overshoot = Overshoot(processes)
        self._leases = Leases(counters)
        self.seeding: Seeding | None = None  # None: accounts start with what `MoneyLimit` tells
        self._concurrency = ConcurrencyLimiter(clock, max_in_flight)
        self._queues = TenantQueues(clock)
        self._rejections = rejections

    async def reserve(self, request: AdmissionRequest) -> Reservation:
        """Raises RateLimited with an exact `retry_after_s`, InsufficientQuota or Unavailable; nothing
        is held then."""
        started = self._clock.monotonic()
        if not self._concurrency.try_acquire(request.plan.priority):
            await self._concurrency.acquire(request)
        try:
            held = await self._reserve(request)
        except BaseException:
            self._concurrency.release()
            raise
        held.queued_ms = round((self._clock.monotonic() - started) * 1000)
        if held.queued_ms >= MIN_RECORDED_WAIT_MS and self._rejections is not None:
            self._rejections.waited(request.tenant_id, "queue", held.queued_ms)
        self._leases.add(held)
        for key in held.grant.shadow:
            metrics.limit_shadow.labels(key.rpartition(":")[0]).inc()
        return held

    async def extend(self, reservation: Reservation, output_tokens: int) -> int:
        """Cover up to `output_tokens` more. Returns how many the money allows; 0 ends the response.

        The rate limits are charged for them too, below zero if necessary. Without Redis it retries
        for a second and raises DependencyDown: money fails closed.
        """
        request, before = reservation.request, reservation.covered
        if before == NO_LIMIT:
            return output_tokens
        covered_target = before + output_tokens
        so_far = bucket_amounts(
            reservation.planned.rules,
            request.plan,
            SettledUsage(request.prompt_tokens, 0, covered_target),
        )
        short = (
            request.base_cost_units
            + covered_target * request.output_cost_units
            - reservation.held_units
        )
        least = short - (output_tokens - 1) * request.output_cost_units
        granted = await self._hold_more(reservation, so_far, nano_ceil(least), nano_ceil(short))
        reservation.held_units += granted * PICO_PER_NANO
        covered = output_tokens_covered(request, reservation.held_units)
        reservation.covered = max(before, min(covered_target, covered))
        if reservation.covered < covered_target:  # the next such request is refused before it runs
            self._learn(request, covered_target)
        return reservation.covered - before

    def keep(self, reservation: Reservation) -> None:
        if reservation.planned.bucket_request.hold is not None and not reservation.ended:
            self._leases.keep(reservation)

    async def settle(self, reservation: Reservation, usage: SettledUsage) -> None:
        """Keep the usage and return the rest of the reservation in one step. A second call has no
        effect."""
        if reservation.ended:
            return
        reservation.ended = True
        request = reservation.request
        self._overshoot.end(request.tenant_id, request.key_id, reservation.beyond)
        if usage.output_tokens:  # a request without output says nothing about answers' length
            self._learn(request, usage.output_tokens)
        exact = bucket_amounts(reservation.planned.rules, request.plan, usage)
        self._concurrency.release()
        await self._leases.end(
            reservation.counters,
            request.tenant_id,
            request.request_id,
            exact,
            nano_ceil(usage.cost_units),
        )
        self._queues.wake(request.tenant_id)

    def _learn(self, request: AdmissionRequest, output_tokens: int) -> None:
        each = output_tokens // request.choices
        self._estimates.learn(request.tenant_id, request.model, each, request.plan.expected_output)

    async def refused(self, ctx: ServedRequest, error: Exception) -> Exception:
        """The error to send for a request that was refused, which counts as a request."""
        return await self.request_rate.count_refused(ctx, error)

    async def release(self, reservation: Reservation) -> None:
        """Return the whole reservation of a request that never ran."""
        await self.settle(reservation, UNUSED)

    async def settle_lost(self, tenant_id: str, request_id: str, cost_units: int) -> None:
        """Settle the money hold of a request whose gateway process died to its exact cost."""
        await self._leases.end(
            self._counters.shared, tenant_id, request_id, (), nano_ceil(cost_units)
        )

    async def run(self) -> None:
        """Renews leases and retries failed settlements, until cancelled."""
        await self._leases.run()

    async def close(self) -> None:
        """Retry owed settlements once more, as far as the counters answer."""
        await self._leases.flush()

    async def _reserve(self, request: AdmissionRequest) -> Reservation:
        if self._queues.has_waiting(request.tenant_id):
            return await self._queues.wait(request, self._attempt)  # no overtaking
        answer = await self._attempt(request)
        if not isinstance(answer, Denial):
            return answer
        if request.plan.queue_wait_s > 0 and self._may_wait(request, answer):
            return await self._queues.wait(request, self._attempt)
        raise self._rejection(request, answer)

    async def _attempt(self, request: AdmissionRequest) -> Reservation | Denial:
        """One attempt without waiting. Raises an error when waiting cannot help."""
        expected = self._estimates.expect(
            request.tenant_id, request.model, request.plan.expected_output
        )
        worst = request.worst_output(expected)
        estimate = self._overshoot.estimate(
            request.tenant_id,
            request.key_id,
            request.plan,
            (request.estimated_output(expected), worst),
        )
        counters, shares = self._counters.choose(needs_money=bool(request.money))
        planned = plan_buckets(request, estimate, shares=shares, seeds=self.seeding is None)
        answer, counters = await self._counters.reserve(counters, planned, request, estimate)
        if isinstance(answer, Denial) and answer.unseeded and self.seeding is not None:
            await self.seeding.seed(request)
            answer, counters = await self._counters.reserve(counters, planned, request, estimate)
        if isinstance(answer, Denial):
            if answer.money or answer.unseeded:
                raise self._rejection(request, answer)
            return answer
        held = answer.held * PICO_PER_NANO
        mode = "shared" if counters is self._counters.shared else "local"
        covered = output_tokens_covered(request, held)
        self._overshoot.begin(request.tenant_id, request.key_id, worst - estimate)
        return Reservation(
            request, planned, answer, counters, self, covered, held, mode, beyond=worst - estimate
        )

    def _may_wait(self, request: AdmissionRequest, denial: Denial) -> bool:
        """Whether the known wait fits the plan's bound; a longer one is refused at once."""
        only_buckets = all(state.wait_ms is not None for state in denial.buckets)
        return only_buckets and (denial.wait_ms or 0) <= request.wait_bound_s * 1000

    def _rejection(self, request: AdmissionRequest, denial: Denial) -> TollhouseError:
        if denial.unseeded:
            return DependencyDown(
                "Spend is being recalculated, because the counters lost their data.",
                next_step="Try again shortly.",
                retry_after_s=1.0,
            )
        if denial.money:
            return out_of_money_error(denial, _affordable_output(request, denial))
        if any(s.wait_ms is None for s in denial.buckets if s.key in denial.keys):
            return too_large_error(denial)
        return over_limit_error(denial, self._concurrency.expected_wait_s())

    async def _hold_more(
        self, reservation: Reservation, so_far: list[int], need: int, want: int
    ) -> int:
        bucket_request = reservation.planned.bucket_request
        for _ in range(_EXTEND_ATTEMPTS):
            try:
                granted = await reservation.counters.extend(
                    bucket_request.group, bucket_request.id, so_far, need, want
                )
                if granted >= 0:
                    return granted
                if self.seeding is None:
                    return 0
                await self.seeding.recover(reservation)
            except TollhouseError:
                await asyncio.sleep(_EXTEND_PAUSE_S)
        log.warning("an answer ends early: the counters do not answer, so no money could be held")
        raise counters_down("money")


def _affordable_output(request: AdmissionRequest, denial: Denial) -> int:
    """Output tokens of one choice that the money would cover."""
    if not request.output_cost_units:
        return 0
    left = denial.affordable * PICO_PER_NANO - request.base_cost_units
    return max(0, left // request.output_cost_units // request.choices)


class Admission:
    """The price of a request, then one reservation over limits and money."""

    def __init__(self, limiter: Limiter, prices: PriceList, clock: Clock) -> None:
        self._limiter = limiter
        self.request_rate = limiter.request_rate
        self._prices = prices
        self._clock = clock
        self._bounds = CostBounds()
        self.refused = limiter.refused

    async def reserve(self, request: AdmissionRequest) -> Reservation:
        """May wait in the plan's queue. Raises RateLimited, InsufficientQuota or Unavailable."""
        quote = await self._prices.quote(request, self._clock.now())
        if quote.money:
            base, per_output_token = self._bounds.of(quote.price, request)
            if request.bound is not None:
                base += quote.price.most_for(request.bound)
            request = replace(
                request,
                money=quote.money,
                base_cost_units=base,
                output_cost_units=per_output_token,
            )
        reservation = await self._limiter.reserve(request)
        reservation.price = quote.price
        return reservation

    def begin_tier(self, ctx: ServedRequest) -> None:
        """Give the request the priority of its service tier. Raises UnsupportedParameter where the
        model does not have the tier."""
        tier = ctx.request.service_tier
        if tier is not None:
            book, now = self._prices.book, self._clock.now()
            ctx.principal = in_tier(ctx.principal, ctx.target, tier, book, now)

    def reprice_cached(self, reservation: Reservation) -> bool:
        """Pin the price of an answer from the response cache. False if the money that is held does
        not cover it; the reservation is as before then."""
        request = reservation.request
        price = self._prices.cached_price(request, self._clock.now())
        hit = Counts.of_answer(0, 0, 0, adapter=request.adapter is not None)
        if request.money and price.cost(hit) > reservation.held_units:
            return False
        reservation.price = price
        return True
