"""Built from kernel.c."""

from collections.abc import Sequence
from typing import Any

INTERFACE: int

class Bucket:
    """As `token_buckets.PlainBucket`."""

    debt: int

    def __new__(cls, debt: int, at: int, /) -> Bucket: ...
    @property
    def at(self) -> int: ...

class Rows:
    """As `token_buckets.PlainRows`, of buckets of this module."""

    def __new__(cls, rows: tuple[tuple[Any, int, int, int, int, Any], ...], /) -> Rows: ...
    @property
    def rows(self) -> tuple[tuple[Any, int, int, int, int, Any], ...]: ...
    def take(self, now: int, /) -> tuple[list[Any], tuple[int, ...], tuple[int, ...]]: ...
    def change(self, before: Sequence[int], amounts: Sequence[int], now: int, /) -> None: ...

class Fields:
    """The headers of a plan's buckets. `kinds`: the names of what remains and of the time, the whole
    header of each limit, and the index and limit of each bucket. `policies`: a whole header.
    `states_name`: of the header with all buckets, whose `names` are in quotes."""

    def __new__(
        cls,
        kinds: tuple[
            tuple[bytes, bytes, tuple[tuple[bytes, bytes], ...], tuple[tuple[int, int], ...]], ...
        ],
        policies: tuple[bytes, bytes],
        states_name: bytes,
        names: tuple[bytes, ...],
        /,
    ) -> Fields: ...
    def write(
        self, remaining: tuple[int, ...], reset_ms: tuple[int, ...], /
    ) -> list[tuple[bytes, bytes]]: ...

def recorded_scores(scores: dict[str, float], least: float, /) -> dict[str, float]:
    """As `records.recorded_scores`."""

def word_ids(
    text: str, known: dict[str, list[int]], digits: int, /
) -> tuple[list[int], int] | None:
    """The ids of an ASCII text's words and how many they are; None where one is not known. `digits`:
    the most of a word as Llama and Qwen cut, 0 for GPT-2's words."""
