"""Limits and the budget hold: one atomic step before the work, one exact settlement after it.

`reserve` passes the house's own gate first, then the counters; over a limit it waits in the plan's
queue or refuses. Every way out of a request ends in `settle` or `release`, once.
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
WORTH_TELLING_MS = 20  # less is the counters' own round trip, not a queue
_EXTEND_PAUSE_S = 0.1


@dataclass(slots=True)
class Reservation:
    """Held until it is settled or released. `covered_output_tokens` is how far the money reaches:
    deliver no token beyond it before `Limiter.extend` raised it. None: no money limit at all."""

    ask: Ask
    wished: Wished
    grant: Grant
    home: Counters
    covered_output_tokens: int | None
    held_units: int
    mode: str = "shared"  # or "local": counted by this process alone while Redis is down
    queued_ms: int = 0
    ended: bool = False

    @property
    def buckets(self) -> tuple[BucketState, ...]:
        return self.grant.buckets

    @property
    def shadow(self) -> tuple[str, ...]:
        """Limits on trial that would have refused this request."""
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
        """`processes` share the limits while Redis is down in mode `local`; 0 in flight: no gate."""
        self._standby = StandbyCounters(counters, clock, mode=when_down, processes=processes)
        self._clock = clock
        self._estimates = OutputEstimates()
        self._leases = Leases()
        self._gate = Gate(clock, max_in_flight)
        self._rooms = WaitingRooms(clock)
        self._tally = tally

    async def reserve(self, ask: Ask) -> Reservation:
        """Refused: RateLimited with a true `retry_after_s`, InsufficientQuota, or Unavailable;
        nothing is then held."""
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
        """Cover this many more output tokens, or as many as the money allows; 0 is the end of it.

        Returns how many more are covered. Rates are raised with them, into debt if it must be.
        Without Redis it tries for a second and then gives 0: money fails closed.
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
        """Return the difference of everything in one go. A second call does nothing."""
        ask = reservation.ask
        each = counted.output_tokens // ask.choices
        self._estimates.learn(ask.tenant_id, ask.model, each, ask.plan.expected_output)
        exact = amounts(reservation.wished.rules, ask.plan, counted)
        await self._end(reservation, exact, nano_ceil(counted.cost_units))

    async def release(self, reservation: Reservation) -> None:
        """The request never ran: give everything back."""
        await self._end(reservation, [0] * len(reservation.wished.rules), 0)

    async def settle_lost(self, tenant_id: str, request_id: str, cost_units: int) -> None:
        """For a request whose gateway died: its money hold becomes what it truly cost."""
        await self._leases.end(
            self._standby.shared, tenant_id, request_id, (), nano_ceil(cost_units)
        )

    async def run(self) -> None:
        """Keeps leases alive and settles again what Redis missed. Cancel it at shutdown."""
        await self._leases.run()

    async def close(self) -> None:
        """Settle what is still owed, as far as the counters answer."""
        await self._leases.flush()

    async def _reserve(self, ask: Ask) -> Reservation:
        if self._rooms.has_waiting(ask.tenant_id):
            return await self._rooms.wait(ask, self._attempt)  # nobody barges in front of a queue
        answer = await self._attempt(ask)
        if isinstance(answer, Reservation):
            return answer
        if ask.plan.queue_wait_s > 0 and self._may_wait(ask, answer):
            return await self._rooms.wait(ask, self._attempt)
        raise self._refused(ask, answer)

    async def _attempt(self, ask: Ask) -> "Reservation | Denial":
        """Once, without waiting. Raises what no waiting would help against."""
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
        """A wait that is known to be longer than the plan's bound would only waste it."""
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
    """No retry can help: answered with `x-should-retry: false`."""
    return isinstance(error, InsufficientQuota)
