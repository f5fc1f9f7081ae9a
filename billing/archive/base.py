"""The port of raw events and their charges: read for exports and the usage API, whatever keeps them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which events: those that occurred from `start` to `end`, of one tenant and project if given, with
    ids before `below` ("" is no bound)."""

    start: datetime
    end: datetime  # exclusive
    tenant_id: str = ""
    project_id: str = ""
    below: str = ""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Buckets of `width_s` seconds by columns; `matching` holds wanted values by column, `batch`
    whether only events of batches (True) or only others (False) are wanted."""

    width_s: int
    by: tuple[str, ...] = ()
    matching: tuple[tuple[str, tuple[str, ...]], ...] = ()
    batch: bool | None = None


@dataclass(frozen=True, slots=True)
class Totals:
    """What two stores of the same rows must agree on."""

    events: int
    tokens: int  # input, output and waived
    charges: int
    units: int  # picounits


class RawArchive(Protocol):
    """Raises DependencyDown if it does not answer. A row that is stored again is kept once."""

    def store(self, events: Rows, charges: Rows) -> None:
        """Rows with the columns EVENT_COLUMNS and CHARGE_COLUMNS."""

    def totals(self, first: str, below: str) -> Totals:
        """Of the request ids from `first` to before `below`."""

    def usage(self, wanted: Wanted, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """Events in the order of their ids. A column that is not archived is None."""

    def charges(
        self, wanted: Wanted, columns: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[Any, ...]]:
        """Charges in the order of their ids; a column is ("event" or "charge", its name)."""

    def buckets(self, wanted: Wanted, grouping: Grouping) -> Iterator[dict[str, Any]]:
        """Sums by bucket (seconds since 1970) and group, with the columns of the roll-ups."""
