"""The compiled buckets against the plain ones, and these against the rule of a token bucket."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import compiled, token_buckets
from core.counters import DAY_MS, Take
from core.token_buckets import PlainBucket, PlainRows, TokenBuckets, give_back
from tests.compiled import built_extension

SOURCE = Path(compiled.__file__).with_name("kernel.c")
LARGEST = 2**52 - 1  # the largest capacity: with the longest period it passes 64 bits
capacities = st.one_of(st.integers(1, 50), st.integers(1, LARGEST))
periods = st.one_of(st.integers(1, 100), st.integers(1, DAY_MS))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return built_extension(SOURCE, tmp_path_factory.mktemp("buckets"))


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[Take, ...]]:
    sizes = draw(st.lists(st.tuples(capacities, periods), min_size=1, max_size=4))
    amount = st.one_of(st.integers(0, 60), st.integers(0, LARGEST))
    names = st.lists(st.integers(0, len(sizes) - 1), max_size=5)
    return [
        tuple([Take(f"k{at}", *sizes[at], draw(amount), 0) for at in draw(names)]) for _ in range(4)
    ]


steps = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.integers(-50, 200), st.integers(0, 2**43)),
        st.sampled_from(["take", "change", "give back"]),
        st.lists(st.one_of(st.integers(0, 90), st.integers(0, LARGEST)), max_size=6),
    ),
    max_size=12,
)


@given(requests(), steps)
def test_the_compiled_buckets_are_the_plain_ones(
    kernel: Any, of: list[tuple[Take, ...]], steps: list[tuple[int, int, str, list[int]]]
) -> None:
    """Whatever is taken, changed and given back, also if the clock goes backwards."""
    kinds: list[tuple[Any, Any]] = [(PlainBucket, PlainRows), (kernel.Bucket, kernel.Rows)]
    found: list[list[Any]] = []
    for bucket, rows in kinds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_buckets, "_NewBucket", bucket)
            patch.setattr(token_buckets, "_NewRows", rows)
            buckets, now, seen = TokenBuckets(), 10_000, list[Any]()
            for which, later, what, amounts in steps:
                now = max(0, now + later)
                takes = buckets.of("g", of[which], now)
                if what == "change":
                    seen.append(takes.rows.change(takes.amounts, amounts, now))
                else:
                    seen.append(takes.rows.take(now))
                if what == "give back":
                    seen.append(give_back(takes))
                seen.append([(row[0].debt, row[0].at) for row in takes.rows.rows])
        found.append(seen)
    assert found[0] == found[1]


@given(capacities, periods, st.lists(st.tuples(st.integers(0, 500), st.integers(0, 60))))
def test_a_bucket_refills_by_its_rate(
    capacity: int, period: int, taken: list[tuple[int, int]]
) -> None:
    """Reckoned in fractions of a unit: nothing is rounded but what is told."""
    bucket, level, now = PlainBucket(0, 0), Fraction(capacity), 0
    for later, amount in taken:
        now += later
        level = min(Fraction(capacity), level + Fraction(capacity * later, period))
        take = Take("k", capacity, period, amount, 0)
        most = (capacity - amount) * period
        rows = PlainRows(((bucket, capacity, period, amount * period, most, take),))
        full, remaining, reset = rows.take(now)
        assert bool(full) == (level < amount)
        level -= amount
        assert remaining == (max(0, level // 1),)
        assert reset == (-((level - capacity) * period / capacity // 1),)


@pytest.mark.parametrize(
    "rows",
    [
        ((),),
        ((None, 1, 1, 1, 1, None),),
        [],
        lambda new: ((new(0, 0), 0, 1, 1, 1, None),),
        lambda new: ((new(0, 0), 2**64, 1, 1, 1, None),),
        lambda new: ((new(0, 0), 1, 1, 1, "1", None),),
    ],
)
def test_what_is_no_row_is_refused(kernel: Any, rows: Any) -> None:
    with pytest.raises((TypeError, ValueError, OverflowError)):
        kernel.Rows(rows(kernel.Bucket) if callable(rows) else rows)
