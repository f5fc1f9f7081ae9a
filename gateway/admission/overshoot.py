"""Bounds by how much requests may exceed their reservations, all together.

A reservation takes what an answer usually has, which is far less than what the request allows. Requests
that are sent at once could therefore exceed a limit many times over, and all keys of the tenant would
wait until that is worn off. Of a tenant's running requests, what they may generate beyond what they
reserved is at most one limit, and of one key's at most what the limits that it shares refill in
`core.tenants.plans.KEY_OVERSHOOT_S`, so that other keys wait no longer for it. Both are divided by the
processes that grant them; requests beyond that reserve their worst case.
"""

from collections import defaultdict

from core.tenants.plans import Plan


class Overshoot:
    def __init__(self, processes: int) -> None:
        self._processes = max(1, processes)
        self._open: defaultdict[str, int] = defaultdict(int)  # tokens, by tenant or key

    def estimate(self, tenant_id: str, key_id: str, plan: Plan, sizes: tuple[int, int]) -> int:
        """The output tokens to reserve of `sizes`, the estimate and the worst case: the estimate, if
        the rest may be exceeded too."""
        estimate, worst = sizes
        limit = plan.least_output_limit
        if worst <= estimate or limit is None:
            return estimate
        room = limit // self._processes - self._open.get(tenant_id, 0)
        shared = plan.key_overshoot
        if shared is not None:
            of_key = shared // self._processes - self._open.get(key_id, 0)
            room = of_key if of_key < room else room
        return estimate if worst - estimate <= room else worst

    def begin(self, tenant_id: str, key_id: str, tokens: int) -> None:
        if tokens > 0:
            self._open[tenant_id] += tokens
            self._open[key_id] += tokens

    def end(self, tenant_id: str, key_id: str, tokens: int) -> None:
        if tokens > 0:
            for owner in (tenant_id, key_id):
                self._open[owner] -= tokens
                if self._open[owner] <= 0:
                    del self._open[owner]
