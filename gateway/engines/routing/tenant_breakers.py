"""The circuit breakers of one replica by tenant.

An engine that answers with an error may have been given cause by the request, so such errors close
the replica to the tenant that gets them and to nobody else. Once several tenants get them at the same
time, the cause is the replica's.
"""

from collections import OrderedDict

from core.clock import Clock
from gateway.engines.routing.breaker import Breaker, State

_MOST_TENANTS = 1000


class TenantBreakers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._breakers: OrderedDict[str, Breaker] = OrderedDict()  # of tenants that got errors

    def allows(self, tenant: str) -> bool:
        own = self._breakers.get(tenant)
        return own is None or own.allows()

    def retry_after_s(self, tenant: str) -> float:
        own = self._breakers.get(tenant)
        return 0.0 if own is None else own.retry_after_s()

    def sent(self, tenant: str) -> None:
        if (own := self._breakers.get(tenant)) is not None:
            own.sent()

    def released(self, tenant: str) -> None:
        if (own := self._breakers.get(tenant)) is not None:
            own.released()

    def succeeded(self, tenant: str) -> None:
        self._breakers.pop(tenant, None)

    def failed(self, tenant: str) -> bool:
        """Whether the replica is closed to several tenants by now."""
        own = self._breakers.pop(tenant, None) or Breaker(self._clock)
        self._breakers[tenant] = own
        if len(self._breakers) > _MOST_TENANTS:
            self._breakers.popitem(last=False)
        own.failed()
        closed = sum(each.state is State.OPEN for each in self._breakers.values())
        return own.state is State.OPEN and closed > 1
