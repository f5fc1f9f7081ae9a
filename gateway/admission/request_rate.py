"""The request limits alone, taken before work that costs more than parsing a request.

A long prompt takes seconds of CPU to encode, and only then is its reservation possible. The limits on
requests need no token count, so they are taken first, given back before the reservation takes them
again, and kept where the prompt is refused.
"""

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

import msgspec

from core.counters import BucketRequest, Counters, Denial
from core.errors import TollhouseError
from core.tenants.plans import Plan, Unit
from gateway.admission.leases import FailoverCounters
from gateway.admission.rejections import over_limit_error
from gateway.admission.request import AdmissionRequest, ServedRequest
from gateway.admission.reservation import plan_buckets

_WRONG = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)


@dataclass(frozen=True, slots=True)
class TakenRequest:
    counters: Counters
    taken: BucketRequest

    async def give_back(self) -> None:
        await self._settle(0)

    async def keep(self) -> None:
        await self._settle(1)

    async def _settle(self, requests: int) -> None:
        exact = [requests] * len(self.taken.takes)
        await self.counters.settle(self.taken.group, self.taken.id, exact, 0)


class RequestRate:
    def __init__(self, counters: FailoverCounters) -> None:
        self._counters = counters

    def hold_for_large(self, ctx: ServedRequest) -> Callable[[], AbstractAsyncContextManager[None]]:
        """Holds the limits on requests while the prompt of a large request is encoded. They stay
        taken if it is refused, so that refused prompts cost no more than the plan allows. A
        conversation whose beginning is cached needs little work, and holds nothing."""
        if not ctx.large:
            return nullcontext
        return lambda: self._held(
            AdmissionRequest.without_prompt(ctx.request_id, ctx.principal, ctx.target.model.name)
        )

    @asynccontextmanager
    async def _held(self, request: AdmissionRequest) -> AsyncIterator[None]:
        taken = await self.take(request, may_wait=True)
        try:
            yield
        except BaseException:
            if taken is not None:
                await taken.keep()
            raise
        if taken is not None:
            await taken.give_back()

    async def count(self, request: AdmissionRequest) -> None:
        """Count a request that needs no reservation. Raises RateLimited."""
        taken = await self.take(request, may_wait=False)
        if taken is not None:
            await taken.keep()

    async def count_refused(self, ctx: ServedRequest, error: Exception) -> Exception:
        """A request that is refused as wrong before its reservation counts; over the limits, the
        refusal is that of the limit."""
        wrong = isinstance(error, TollhouseError) and error.status in _WRONG
        target = getattr(ctx, "target", None)
        # Those of a large request are taken before its prompt is encoded.
        is_counted = ctx.reservation is not None or (ctx.large and target is not None)
        is_known = ctx.tenant_id is not None and ctx.exchange.batch_job is None
        if not (wrong and is_known) or is_counted:
            return error
        model = target.model.name if target is not None else ""
        try:
            await self.count(AdmissionRequest.without_prompt(ctx.request_id, ctx.principal, model))
        except TollhouseError as refusal:
            return refusal
        return error

    async def take(self, request: AdmissionRequest, *, may_wait: bool) -> TakenRequest | None:
        """None where the plan limits no requests, or where the request `may_wait` in the plan's
        queue, whose length is bounded. Raises RateLimited."""
        plan = _requests_only(request.plan)
        if not plan.rules:
            return None
        counters, shares = self._counters.choose(needs_money=False)
        # Under an id of its own: the reservation has the request's.
        id = f"{request.request_id}-first"
        request = msgspec.structs.replace(request, request_id=id, plan=plan)
        planned = plan_buckets(request, 0, shares=shares)
        answer, counters = await self._counters.reserve(counters, planned, request, 0)
        if not isinstance(answer, Denial):
            return TakenRequest(counters, planned.bucket_request)
        if may_wait and 0 < (answer.wait_ms or 0) <= plan.queue_wait_s * 1000:
            return None
        raise over_limit_error(answer, 0.0)


@lru_cache(maxsize=4_096)
def _requests_only(plan: Plan) -> Plan:
    """The same object for the same plan, so that its layout of buckets is found again."""
    rules = tuple(rule for rule in plan.rules if rule.unit is Unit.REQUESTS)
    return plan if rules == plan.rules else dataclasses.replace(plan, rules=rules)
