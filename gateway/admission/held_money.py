"""The audit's check of the counters: what a cap holds is the sum of the reservations under it."""

from collections.abc import Mapping, Sequence

from billing.differences import Difference, amount
from core.counters import PICO_PER_NANO, Counters


async def held_money_differences(
    counters: Counters, keys: Mapping[str, Sequence[str]]
) -> list[Difference]:
    """`keys`: the keys of money limits by tenant. Raises Unavailable if the counters do not answer.
    Exact under load too, since the counters compare each tenant's in one step."""
    found = []
    for tenant_id, named in keys.items():
        for each in await counters.holds(tenant_id, named):
            if each.held == each.reserved:
                continue
            message = (
                f"{each.key} holds {each.held} nano-units, but its reservations {each.reserved}"
            )
            units = (each.held - each.reserved) * PICO_PER_NANO
            found.append(amount("reservations/holds", message, units, tenant_id=tenant_id))
    return found
