"""The declared failure mode of limits while the shared counters do not answer.

`closed` refuses requests; `local` lets this process grant its share of every limit by itself. Money
fails closed in both. Each response's headers and a metric state the mode.
"""

from core import metrics
from core.clock import Clock
from core.counters import BucketGrant, Counters, Denial
from core.counters_memory import MemoryCounters
from core.errors import DependencyDown, Unavailable
from gateway.admission.planning import PlannedBuckets, plan_buckets
from gateway.admission.request import AdmissionRequest

MODES = {"shared": 0, "local": 1, "closed": 2}


class FailoverCounters:
    def __init__(self, shared: Counters, clock: Clock, *, mode: str, processes: int) -> None:
        self.shared = shared
        self._local = MemoryCounters(clock)
        self._mode = mode
        self._shares = max(1, processes)
        self._reported_mode = ""  # the mode that the metric shows

    def choose(self, *, needs_money: bool) -> tuple[Counters, int]:
        """(counters, divisor of the limits). Skips the shared counters when they are known to be down."""
        if getattr(self.shared, "down", False):
            return self._fall_back(needs_money), self._shares
        return self.shared, 1

    async def reserve(
        self, counters: Counters, planned: PlannedBuckets, request: AdmissionRequest, estimate: int
    ) -> tuple[BucketGrant | Denial, Counters]:
        try:
            answer = await counters.reserve(planned.bucket_request)
        except Unavailable:
            local = self._fall_back(bool(request.money))
            local_plan = plan_buckets(request, estimate, shares=self._shares)
            return await local.reserve(local_plan.bucket_request), local
        if counters is self.shared:
            self._report_mode("shared")
        return answer, counters

    def _fall_back(self, needs_money: bool) -> Counters:
        self._report_mode(self._mode)
        if self._mode == "local" and not needs_money:
            return self._local
        what = "money" if needs_money else "limits"
        raise DependencyDown(
            f"The counters do not answer, so {what} cannot be checked.",
            next_step="Retry in a second; the operator checks TOLLHOUSE_REDIS_URL.",
            code="limits_unavailable",
            retry_after_s=1.0,
        )

    def _report_mode(self, mode: str) -> None:
        if mode != self._reported_mode:
            self._reported_mode = mode
            metrics.limit_mode.set(MODES[mode])
