"""Records of one project that are encrypted at rest, as routes read and change them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from sqlalchemy.orm import Session

from core.sealing import Sealer
from gateway.serving.api.dependencies import (
    ClockDep,
    CountedCaller,
    DatabaseDep,
    OperatorToken,
    QuotasDep,
)


def item_page(
    items: Sequence[dict[str, Any]], *, after: str | None, limit: int, order: str
) -> dict[str, Any]:
    """`items` are in the order in which they were added."""
    found = [listed_item(each) for each in items]
    if order == "desc":
        found.reverse()
    ids = [each["id"] for each in found]
    begin = ids.index(after) + 1 if after in ids else 0
    page = found[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": begin + limit < len(found),
    }


def listed_item(item: dict[str, Any]) -> dict[str, Any]:
    """A message's content is a list of parts, also where the client wrote a text."""
    if isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": kind, "text": item["content"]}]}
    return {"type": "message", "status": "completed", **item}


R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class SealedStore(Generic[R]):
    """A dependency of routes; a subclass names its kind of records."""

    records: ClassVar[type[Any]]  # R, made of session, sealer, scope and the time
    database: DatabaseDep
    clock: ClockDep
    token: OperatorToken
    caller: CountedCaller
    quotas: QuotasDep

    def read(self, act: Callable[[R], T]) -> T:
        with self.database.read() as session:
            return act(self._of(session))

    def change(self, act: Callable[[R], T]) -> T:
        with self.database.transaction() as session:
            return act(self._of(session))

    def grow(self, size: int, act: Callable[[R], T]) -> T:
        """As `change`, for what adds `size` bytes. InsufficientQuota if they do not fit."""
        with self.database.transaction() as session:
            self.quotas.check(session, self.caller.tenant_id, self.caller.plan, size)
            return act(self._of(session))

    def _of(self, session: Session) -> R:
        sealer = Sealer(self.token)
        made: R = self.records(session, sealer, self.caller.scope, self.clock.now())
        return made
