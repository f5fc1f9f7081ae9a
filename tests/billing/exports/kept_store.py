"""A store of moved days in memory, and rows of closed and moved days as a test says them."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from billing.usage.raw_rows import Grouping, Reading, Rows, Wanted
from billing.usage.tables import ClosedDay, MovedDay, UsageBatch
from core.errors import DependencyDown
from tests.billing.conftest import START, Deployment

DAY, HOUR, MOMENT = timedelta(days=1), timedelta(hours=1), timedelta(microseconds=1)
NOW = START + 10 * DAY + 5 * HOUR


class Kept:
    """A store of moved days in memory. Its sums are those that a test says."""

    def __init__(self, name: str = "store-1") -> None:
        self.name = name
        self.stored: dict[datetime, list[tuple[Any, ...]]] = {}
        self.done: list[tuple[str, datetime]] = []
        self.said: dict[str, Any] = {}
        self.asked: list[Any] = []
        self.answers: list[Any] = []
        self.down = False

    def ping(self) -> None:
        """It is in this process."""

    def identity(self) -> str:
        if self.down:
            raise DependencyDown("ClickHouse is away.")
        return self.name

    def store(self, day: datetime, rows: Rows) -> None:
        self.done.append(("store", day))
        self.stored.setdefault(day, []).extend(tuple(row) for row in rows)

    def clear(self, day: datetime) -> None:
        self.done.append(("clear", day))
        self.stored.pop(day, None)

    def sum_hours(self, day: datetime) -> None:
        self.done.append(("sum", day))

    def days(self) -> list[datetime]:
        return sorted(self.stored)

    def sums(self, day: datetime) -> dict[str, int]:
        return self.said["sums"]

    def groups(self, day: datetime) -> list[tuple[Any, ...]]:
        return self.said["groups"]

    def hour_groups(self, day: datetime) -> list[tuple[Any, ...]]:
        return self.said["hours"]

    def known(self, request_ids: Sequence[str], last_day: datetime) -> set[str]:
        self.asked.append((tuple(request_ids), last_day))
        return {each for each in request_ids if each.endswith("there")}

    def posted(self, transaction_ids: Sequence[str], last_day: datetime) -> dict[str, int]:
        return {}

    def erase(self, tenant_id: str, end_user: str | None) -> int:
        self.asked.append((tenant_id, end_user))
        return 7

    def charged(
        self, last_day: datetime, key: Sequence[Any], sums: Sequence[Any], conditions: Sequence[Any]
    ) -> Iterator[tuple[Any, ...]]:
        self.asked.append(last_day)
        return iter(self.answers)

    def rows(self, wanted: Wanted, reading: Reading) -> Iterator[tuple[Any, ...]]:
        self.asked.append(wanted)
        return iter(self.answers)

    def buckets(self, wanted: Wanted, grouping: Grouping) -> Iterator[dict[str, Any]]:
        self.asked.append(wanted)
        return iter(self.answers)


def close_day(session: Session, day: int, last: int, sums: dict[str, int] | None = None) -> None:
    row = {"frozen": {}, "digest": "", "signature": "", "closed_at": START + (day + 1) * DAY + HOUR}
    session.add(ClosedDay(day=START + day * DAY, last_batch=last, sums=sums or {}, **row))
    session.flush()


def batch_row(session: Session, number: int, events: int = 1, **fields: Any) -> None:
    given = {"recorded_at": START, "rated_at": START, "summed_at": START, "shard": 0, **fields}
    session.add(UsageBatch(id=number, events=events, **given))
    session.flush()


def moved_row(session: Session, day: int, after: int, last: int, **fields: Any) -> None:
    given = {"store": "store-1", "floor_id": f"req_{day}", "moved_at": NOW, **fields}
    session.add(MovedDay(day=START + day * DAY, after_batch=after, last_batch=last, **given))
    session.flush()


def use_three(made: Deployment) -> None:
    """Three requests in batches 1 to 3, one of them without a charge."""
    for request in ("req_1", "req_2", "req_3"):
        made.record(made.event(request_id=request))
    made.rate()
