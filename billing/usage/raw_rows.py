"""The port of raw events and their charges, as exports, the usage API and the pages read them, and what
a store of moved days does beside."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from sqlalchemy import ColumnElement

Rows = Sequence[Sequence[Any]]
Sums = dict[str, int]  # as `ClosedDay.sums`
_NEVER = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: those that occurred from `start` to `end`, of one tenant and project if given. A
    store of moved days has those of days up to `last_day`."""

    start: datetime
    end: datetime  # exclusive
    tenant_id: str = ""
    project_id: str = ""
    last_day: datetime = _NEVER


@dataclass(frozen=True, slots=True)
class Reading:
    """Columns and conditions are expressions of `UsageEventRow` and `Charge`; an event without a charge
    has null in the charge's columns. The rows are in the order of these expressions."""

    columns: tuple[Any, ...]
    order: tuple[Any, ...]
    falling: bool = False
    conditions: tuple[ColumnElement[bool], ...] = ()
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Grouping:
    """Buckets of `width_s` seconds by columns; `matching` holds wanted values by column, `batch`
    whether only events of batches (True) or only others (False) are wanted."""

    width_s: int
    by: tuple[str, ...] = ()
    matching: tuple[tuple[str, tuple[str, ...]], ...] = ()
    batch: bool | None = None
    conditions: tuple[ColumnElement[bool], ...] = ()


class RawArchive(Protocol):
    """Raises DependencyDown if it does not answer. A row that is stored again is kept once. A day is a
    closed day: that on which usage was recorded."""

    def ping(self) -> None:
        """One round trip, which takes some seconds at most."""

    def identity(self) -> str:
        """Names this store; another one has another name."""

    def store(self, day: datetime, rows: Rows) -> None:
        """Rows with the columns COLUMNS, of a day."""

    def clear(self, day: datetime) -> None:
        """Remove what an interrupted copy of the day has left."""

    def sum_hours(self, day: datetime) -> None:
        """Compute the day's hourly sums from its rows, in place of earlier ones."""

    def days(self) -> list[datetime]:
        """Days of which there are rows, oldest first."""

    def sums(self, day: datetime) -> Sums: ...

    def groups(self, day: datetime) -> list[tuple[Any, ...]]:
        """The charges of a day by `frozen_sums.KEY`, from its rows."""

    def hour_groups(self, day: datetime) -> list[tuple[Any, ...]]:
        """As `groups`, from the hourly sums."""

    def known(self, request_ids: Sequence[str], last_day: datetime) -> set[str]:
        """Which of these requests are stored."""

    def posted(self, transaction_ids: Sequence[str], last_day: datetime) -> dict[str, int]:
        """Picounits of the charges by ledger transaction."""

    def erase(self, tenant_id: str, end_user: str | None) -> int:
        """Remove an end user's name from the tenant's rows; returns how many had it."""

    def charged(
        self,
        last_day: datetime,
        key: Sequence[Any],
        sums: Sequence[Any],
        conditions: Sequence[ColumnElement[bool]],
    ) -> Iterator[tuple[Any, ...]]:
        """Sums of charges by key, as expressions of `UsageEventRow` and `Charge`."""

    def rows(self, wanted: Wanted, reading: Reading) -> Iterator[tuple[Any, ...]]: ...

    def buckets(self, wanted: Wanted, grouping: Grouping) -> Iterator[dict[str, Any]]:
        """Sums by bucket (seconds since 1970) and group, with the columns of the roll-ups."""
