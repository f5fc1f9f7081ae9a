"""Minimum commitments as FOCUS shows them: one for each contract, whatever its changes of seats.

Subscriptions to one plan that continue each other's years are one contract.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from billing.accounts.tables import BillingAccount
from billing.exports.focus.documents import Bounds
from billing.subscriptions.subscriptions import YEAR, committed_around, read_subscriptions
from billing.subscriptions.tables import Plan, Subscription
from core.money import decimal_of, split


@dataclass(frozen=True, slots=True)
class Commitment:
    tenant_id: str
    contract_id: str
    plan: Plan  # with the amounts of the contract
    starts_at: datetime
    ends_at: datetime | None  # None: it runs on
    parts: tuple[Subscription, ...]
    negotiated: bool
    superseded: bool  # by another subscription of the tenant

    @property
    def id(self) -> str:
        return f"{self.contract_id}/commitment"

    @property
    def yearly(self) -> bool:
        return self.plan.committed_by == YEAR

    def overlap(self, bounds: Bounds) -> int:
        """Microseconds of the time that lie in the contract."""
        first = max(self.starts_at, bounds.starts_at)
        last = min(self.ends_at or bounds.ends_at, bounds.ends_at)
        return max(0, int((last - first).total_seconds() * 1_000_000))


def read_commitments(session: Session, tenant_ids: Iterable[str]) -> dict[str, list[Commitment]]:
    """By tenant, in the order of their start."""
    found: dict[str, list[Commitment]] = {}
    for tenant_id, held in read_subscriptions(session, tenant_ids).items():
        contracts: dict[tuple[str, datetime], list[tuple[Subscription, Plan]]] = defaultdict(list)
        for subscription, plan in held:
            if plan.minimum_commitment:
                contracts[(plan.id, subscription.years_from)].append((subscription, plan))
        starts = {subscription.starts_at for subscription, _ in held}
        found[tenant_id] = [_commitment(tenant_id, parts, starts) for parts in contracts.values()]
    return found


def _commitment(
    tenant_id: str, parts: Sequence[tuple[Subscription, Plan]], starts: set[datetime]
) -> Commitment:
    first, last = parts[0][0], parts[-1][0]
    return Commitment(
        tenant_id,
        f"subscription/{first.id}",
        parts[-1][1],
        first.fees_from,
        last.ends_at,
        tuple(each for each, _ in parts),
        any("minimum_commitment" in each.overrides for each, _ in parts),
        last.ends_at in starts,
    )


def applied(
    commitments: Sequence[Commitment], bounds: Bounds, units: int
) -> tuple[str | None, str]:
    """ContractApplied of a shortfall of so many picounits, and the id of the commitment that it is of.
    Several commitments in the time have it by their shares of the committed time and amount."""
    meant = [each for each in commitments if each.overlap(bounds)]
    if not meant:
        return None, ""
    weights = [each.overlap(bounds) * each.plan.minimum_commitment for each in meant]
    parts = split(units, weights) if units >= 0 else [-each for each in split(-units, weights)]
    elements = ",".join(
        f'{{"ContractId":{json.dumps(each.contract_id)},"ContractCommitmentId":{json.dumps(each.id)},'
        f'"ContractCommitmentAppliedCost":{decimal_of(part)},'
        '"ContractCommitmentAppliedQuantity":null,"ContractCommitmentAppliedUnit":null}'
        for each, part in zip(meant, parts, strict=True)
    )
    return f'{{"Elements":[{elements}]}}', meant[-1].id


def terms_of(session: Session, each: Commitment, now: datetime) -> Bounds:
    """The term around now, or the last one of a contract that has ended."""
    account = session.get_one(BillingAccount, each.tenant_id)
    held = (each.parts[-1], each.plan)
    at = now if each.ends_at is None or now < each.ends_at else each.starts_at
    return Bounds(*committed_around(session, held, account, max(at, each.starts_at)))
