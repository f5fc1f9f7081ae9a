"""Limits and the budget hold: one atomic reservation before the work, one settlement after it.

`reserve` checks this process's concurrency limit first, then the counters. Over a limit it waits in
the plan's queue or refuses. Every outcome of a request ends in `settle` or `release`, once.
"""

import asyncio
from dataclasses import dataclass

from core import metrics
from core.clock import Clock
from core.counters import PICO_PER_NANO, BucketState, Counters, Denial, Grant, nano_ceil
from core.errors import InsufficientQuota, TollhouseError
from gateway.limits.estimates import OutputEstimates
from gateway.limits.leases import Leases
from gateway.limits.refusal_tally import RefusalTally
from gateway.limits.refusals import OverLimit, out_of_money, over_limit, too_large
from gateway.limits.saturation import Gate
from gateway.limits.standby import StandbyCounters
from gateway.limits.waiting import WaitingRooms
from gateway.limits.wishes import Ask, Counted, MoneyLimit, Wished, amounts, covered_by, wish_of

__all__ = ["Ask", "Counted", "Limiter", "MoneyLimit", "Reservation"]

_EXTEND_TRIES = 10
WORTH_TELLING_MS = 20  # less is the round trip to the counters, not a queue
_EXTEND_PAUSE_S = 0.1


@dataclass(slots=True)
class Reservation:
    """Held until it is settled or released. `covered_output_tokens` is how many output tokens the
    held money pays for; deliver none beyond it before `Limiter.extend`. None without money limits."""

    ask: Ask
    wished: Wished
    grant: Grant
    home: Counters
    covered_output_tokens: int | None
    held_units: int
    mode: str = "shared"  # or "local": counted in this process while Redis is down
    queued_ms: int = 0
    ended: bool = False

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        return self.grant.buckets

    @property
    def shadow(self) -> tuple[str, ...]:
        """Keys of the shadow limits that would have refused this request."""
        return self.grant.shadow


class Limiter:
    def __init__(
        self,
        counters: Counters,
        clock: Clock,
        *,
        when_down: str = "closed",
        processes: int = 1,
        max_in_flight: int = 0,
        tally: RefusalTally | None = None,
    ) -> None:
        """In mode `local` each of `processes` gets an equal share of the limits while Redis is down.
        `max_in_flight` 0 disables the concurrency limit."""
        self._standby = StandbyCounters(counters, clock, mode=when_down, processes=processes)
        self._clock = clock
        self._estimates = OutputEstimates()
        self._leases = Leases()
        self._gate = Gate(clock, max_in_flight)
        self._rooms = WaitingRooms(clock)
        self._tally = tally

    async def reserve(self, ask: Ask) -> Reservation:
        """Raises RateLimited with an exact `retry_after_s`, InsufficientQuota or Unavailable; nothing
        is held then."""
        began = self._clock.monotonic()
        try:
            await self._gate.enter(ask)
        except TollhouseError:
            self._told(ask, "saturated")
            raise
        try:
            held = await self._reserve(ask)
        except OverLimit as error:
            self._gate.leave()
            if error.code.startswith("queue_"):
                self._told(ask, error.code)
            raise
        except BaseException:
            self._gate.leave()
            raise
        held.queued_ms = round((self._clock.monotonic() - began) * 1000)
        if held.queued_ms >= WORTH_TELLING_MS and self._tally is not None:
            self._tally.waited(ask.tenant_id, "queue", held.queued_ms)
        self._leases.add(held.home, ask.tenant_id, held.wished.wish.id)
        for key in held.shadow:
            metrics.limit_shadow.labels(key.rpartition(":")[0]).inc()
        return held

    async def extend(self, reservation: Reservation, output_tokens: int) -> int:
        """Cover up to `output_tokens` more. Returns how many the money allows; 0 ends the response.

        The rate limits are charged for them too, below zero if necessary. Without Redis it retries
        for a second and returns 0: money fails closed.
        """
        ask = reservation.ask
        if reservation.covered_output_tokens is None:
            return output_tokens
        before = reservation.covered_output_tokens
        reach = before + output_tokens
        so_far = amounts(reservation.wished.rules, ask.plan, Counted(ask.prompt_tokens, 0, reach))
        short = ask.base_cost_units + reach * ask.output_cost_units - reservation.held_units
        least = short - (output_tokens - 1) * ask.output_cost_units
        granted = await self._hold_more(reservation, so_far, nano_ceil(least), nano_ceil(short))
        reservation.held_units += granted * PICO_PER_NANO
        covered = covered_by(ask, reservation.held_units) or 0
        reservation.covered_output_tokens = max(before, min(reach, covered))
        return reservation.covered_output_tokens - before

    async def settle(self, reservation: Reservation, counted: Counted) -> None:
        """Return the unused part of the reservation in one step. A second call has no effect."""
        ask = reservation.ask
        each = counted.output_tokens // ask.choices
        self._estimates.learn(ask.tenant_id, ask.model, each, ask.plan.expected_output)
        exact = amounts(reservation.wished.rules, ask.plan, counted)
        await self._end(reservation, exact, nano_ceil(counted.cost_units))

    async def release(self, reservation: Reservation) -> None:
        """Return the whole reservation of a request that never ran."""
        await self._end(reservation, [0] * len(reservation.wished.rules), 0)

    async def settle_lost(self, tenant_id: str, request_id: str, cost_units: int) -> None:
        """Settle the money hold of a request whose gateway process died to its exact cost."""
        await self._leases.end(
            self._standby.shared, tenant_id, request_id, (), nano_ceil(cost_units)
        )

    async def run(self) -> None:
        """Renews leases and retries failed settlements, until cancelled."""
        await self._leases.run()

    async def close(self) -> None:
        """Retry owed settlements once more, as far as the counters answer."""
        await self._leases.flush()

    async def _reserve(self, ask: Ask) -> Reservation:
        if self._rooms.has_waiting(ask.tenant_id):
            return await self._rooms.wait(ask, self._attempt)  # no overtaking
        answer = await self._attempt(ask)
        if isinstance(answer, Reservation):
            return answer
        if ask.plan.queue_wait_s > 0 and self._may_wait(ask, answer):
            return await self._rooms.wait(ask, self._attempt)
        raise self._refused(ask, answer)

    async def _attempt(self, ask: Ask) -> "Reservation | Denial":
        """One attempt without waiting. Raises an error when waiting cannot help."""
        expected = self._estimates.expect(ask.tenant_id, ask.model, ask.plan.expected_output)
        estimate = min(expected, ask.max_output_tokens or expected) * ask.choices
        home, shares = self._standby.choose(needs_money=bool(ask.money))
        wished = wish_of(ask, estimate, shares=shares)
        answer, home = await self._standby.reserve(home, wished, ask, estimate)
        if isinstance(answer, Denial):
            if answer.money:
                raise self._refused(ask, answer)
            return answer
        held = answer.held * PICO_PER_NANO
        mode = "shared" if home is self._standby.shared else "local"
        return Reservation(ask, wished, answer, home, covered_by(ask, held), held, mode)

    def _may_wait(self, ask: Ask, denial: Denial) -> bool:
        """Whether the known wait fits the plan's bound; a longer one is refused at once."""
        bound = min(ask.plan.queue_wait_s, ask.deadline_s or ask.plan.queue_wait_s)
        only_buckets = all(state.wait_ms is not None for state in denial.buckets)
        return only_buckets and (denial.wait_ms or 0) <= bound * 1000

    def _refused(self, ask: Ask, denial: Denial) -> TollhouseError:
        for key in denial.keys:
            metrics.rejections.labels(key.rpartition(":")[0]).inc()
            self._told(ask, key.rpartition(":")[0])
        if denial.money:
            self._told(ask, "money")
            metrics.rejections.labels("money").inc()
            return out_of_money(denial)
        if any(s.wait_ms is None for s in denial.buckets if s.key in denial.keys):
            return too_large(denial)
        return over_limit(denial, self._gate.typical_s())

    def _told(self, ask: Ask, reason: str) -> None:
        if self._tally is not None:
            self._tally.refused(ask.tenant_id, reason)

    async def _hold_more(
        self, reservation: Reservation, so_far: list[int], need: int, want: int
    ) -> int:
        wish = reservation.wished.wish
        for _ in range(_EXTEND_TRIES):
            try:
                return await reservation.home.extend(wish.group, wish.id, so_far, need, want)
            except TollhouseError:
                await asyncio.sleep(_EXTEND_PAUSE_S)
        metrics.rejections.labels("money_unknown").inc()
        return 0

    async def _end(self, reservation: Reservation, exact: list[int], spent: int) -> None:
        if reservation.ended:
            return
        reservation.ended = True
        self._gate.leave()
        wish = reservation.wished.wish
        await self._leases.end(reservation.home, wish.group, wish.id, exact, spent)
        self._rooms.wake(wish.group)


def is_final(error: TollhouseError) -> bool:
    """No retry can succeed: the response carries `x-should-retry: false`."""
    return isinstance(error, InsufficientQuota)
