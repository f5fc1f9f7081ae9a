"""The declared failure mode of limits while the shared counters do not answer.

`closed` refuses requests; `local` lets this process grant its share of every limit by itself. Money
fails closed in both. Each response's headers and a metric state the mode.
"""

from core import metrics
from core.clock import Clock
from core.counters import Counters, Denial, Grant
from core.counters_memory import MemoryCounters
from core.errors import DependencyDown, Unavailable
from gateway.limits.wishes import Ask, Wished, wish_of

MODES = {"shared": 0, "local": 1, "closed": 2}


class StandbyCounters:
    def __init__(self, shared: Counters, clock: Clock, *, mode: str, processes: int) -> None:
        self.shared = shared
        self._local = MemoryCounters(clock)
        self._mode = mode
        self._shares = max(1, processes)
        self._shown = ""  # the mode that the metric shows

    def choose(self, *, needs_money: bool) -> tuple[Counters, int]:
        """(counters, divisor of the limits). Skips the shared counters when they are known to be down."""
        if getattr(self.shared, "down", False):
            return self._fall_back(needs_money), self._shares
        return self.shared, 1

    async def reserve(
        self, home: Counters, wished: Wished, ask: Ask, estimate: int
    ) -> tuple[Grant | Denial, Counters]:
        try:
            answer = await home.reserve(wished.wish)
        except Unavailable:
            local = self._fall_back(bool(ask.money))
            shared_out = wish_of(ask, estimate, shares=self._shares)
            return await local.reserve(shared_out.wish), local
        if home is self.shared:
            self._show("shared")
        return answer, home

    def _fall_back(self, needs_money: bool) -> Counters:
        self._show(self._mode)
        if self._mode == "local" and not needs_money:
            return self._local
        metrics.rejections.labels("counters_down").inc()
        what = "money" if needs_money else "limits"
        raise DependencyDown(
            f"The counters do not answer, so {what} cannot be checked.",
            next_step="Retry in a second; the operator checks TOLLHOUSE_REDIS_URL.",
            code="limits_unavailable",
            retry_after_s=1.0,
        )

    def _show(self, mode: str) -> None:
        if mode != self._shown:
            self._shown = mode
            metrics.limit_mode.set(MODES[mode])
