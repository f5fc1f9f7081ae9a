"""Differences that an audit reports."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_REQUEST_IDS = 20


@dataclass(frozen=True, slots=True)
class Since:
    """The part of the usage that a check reads: batches after `batch`, request ids from `id` on."""

    batch: int = 0
    id: str = ""


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
