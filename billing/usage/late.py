"""Usage that arrives late, after the day of its request was moved: stored once, here or in the store."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from sqlalchemy.orm import Session

from billing.usage.reading import known_elsewhere
from core.errors import DependencyDown
from core.ids import REQUEST


@dataclass(frozen=True, slots=True)
class MovedRequests:
    """`known` are stored; whether `unchecked` are cannot be said, for the reason."""

    known: set[str] = field(default_factory=set)
    unchecked: set[str] = field(default_factory=set)
    reason: str = ""


def moved_requests(session: Session, floor: str, request_ids: Sequence[str]) -> MovedRequests:
    """Asks the store for requests with ids before `floor`, the first that it cannot have, and for ids
    that tell no time. A current request is never asked for."""
    if not floor:
        return MovedRequests()
    old = [each for each in request_ids if each < floor or not each.startswith(REQUEST)]
    if not old:
        return MovedRequests()
    try:
        return MovedRequests(known_elsewhere(session, old))
    except DependencyDown as error:
        reason = f"its day was moved, so it may be a duplicate. {error.message}"
        return MovedRequests(unchecked=set(old), reason=reason)
