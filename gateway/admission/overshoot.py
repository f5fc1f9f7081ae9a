"""Bounds by how much requests may exceed their reservations, all together.

A reservation takes what an answer usually has, which is far less than what the request allows. Requests
that are sent at once could therefore exceed a limit many times over, and all keys of the tenant would
wait until that is worn off. Of a tenant's running requests, what they may generate beyond what they
reserved is at most one limit, divided by the processes that grant it; others reserve their worst case.
"""

from collections import defaultdict

from core.tenants.plans import Plan


class Overshoot:
    def __init__(self, processes: int) -> None:
        self._processes = max(1, processes)
        self._open: defaultdict[str, int] = defaultdict(int)  # tokens, by tenant

    def estimate(self, tenant_id: str, plan: Plan, estimate: int, worst: int) -> int:
        """The output tokens to reserve: the estimate, if the rest may be exceeded too."""
        if worst <= estimate:
            return estimate
        limit = plan.least_output_limit
        if limit is None:
            return estimate
        room = limit // self._processes - self._open.get(tenant_id, 0)
        return estimate if worst - estimate <= room else worst

    def begin(self, tenant_id: str, tokens: int) -> None:
        if tokens > 0:
            self._open[tenant_id] += tokens

    def end(self, tenant_id: str, tokens: int) -> None:
        if tokens > 0:
            self._open[tenant_id] -= tokens
            if self._open[tenant_id] <= 0:
                del self._open[tenant_id]
