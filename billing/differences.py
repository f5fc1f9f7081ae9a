"""Differences that an audit reports."""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

MAX_REQUEST_IDS = 20


@dataclass(frozen=True, slots=True)
class Since:
    """The part of the rows that a check reads: batches after `batch`, request ids from `id` on, ledger
    entries after `entry`, credit uses after `use`, and what is dated `day` or later. For earlier rows
    the frozen sums of closed days stand, from the first day on.
    """

    batch: int = 0
    id: str = ""
    entry: int = 0
    use: int = 0
    day: datetime | None = None


EVERYTHING = Since()


@dataclass(frozen=True, slots=True)
class Difference:
    check: str  # the two steps compared, e.g. events/charges
    kind: str  # lost | duplicated | amount
    message: str
    count: int = 1
    units: int = 0  # size of the difference in picounits
    request_ids: tuple[str, ...] = ()  # at most MOST_NAMED
    tenant_id: str = ""


def lost(check: str, message: str, request_ids: Iterable[str]) -> list[Difference]:
    return _named(check, "lost", message, request_ids)


def duplicated(check: str, message: str, request_ids: Iterable[str]) -> list[Difference]:
    return _named(check, "duplicated", message, request_ids)


def amount(
    check: str, message: str, units: int, request_ids: Iterable[str] = (), tenant_id: str = ""
) -> Difference:
    named = tuple(request_ids)[:MAX_REQUEST_IDS]
    return Difference(check, "amount", message, 1, units, named, tenant_id)


def _named(check: str, kind: str, message: str, request_ids: Iterable[str]) -> list[Difference]:
    found = list(request_ids)
    if not found:
        return []
    return [Difference(check, kind, message, len(found), 0, tuple(found[:MAX_REQUEST_IDS]))]
