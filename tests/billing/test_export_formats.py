"""The same rows come back out of CSV, JSON Lines and Parquet, to the last unit."""

import csv
import io
import json
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.exports.encoding import format_of
from billing.exports.formats import BATCH_ROWS, Column, Format, Kind, encode
from core.errors import MissingExtra
from core.money import units_of

COLUMNS = [
    Column("name"),
    Column("count", Kind.WHOLE),
    Column("late", Kind.FLAG),
    Column("amount", Kind.UNITS),
    Column("at", Kind.MOMENT),
]
NOON = datetime(2026, 2, 28, 12, tzinfo=UTC)
rows = st.lists(
    st.tuples(
        st.none() | st.text(st.characters(exclude_categories=("Cs", "Cc")), max_size=8),
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.none() | st.integers(-(10**25), 10**25),
        st.just(NOON),
    ),
    max_size=5,
)


def whole(form: Format, given_rows: list[tuple[object, ...]]) -> bytes:
    return b"".join(encode(given_rows, COLUMNS, form))


@given(rows)
def test_json_lines_come_back(given_rows: list[tuple[object, ...]]) -> None:
    back = [json.loads(line) for line in whole(Format.JSONL, given_rows).splitlines()]
    assert [(b["name"], b["count"], b["late"]) for b in back] == [r[:3] for r in given_rows]
    amounts = [None if b["amount"] is None else units_of(b["amount"]) for b in back]
    assert amounts == [row[3] for row in given_rows]


@given(rows)
def test_parquet_comes_back(given_rows: list[tuple[object, ...]]) -> None:
    back = pq.read_table(io.BytesIO(whole(Format.PARQUET, given_rows))).to_pylist()
    assert [(b["name"], b["count"], b["late"], b["at"]) for b in back] == [
        (*row[:3], row[4]) for row in given_rows
    ]
    for read, row in zip(back, given_rows, strict=True):
        assert read["amount"] == (None if row[3] is None else Decimal(int(str(row[3]))).scaleb(-12))


def test_amounts_in_parquet_have_twelve_places_whatever_they_are() -> None:
    columns = [*COLUMNS, Column("rate", Kind.DECIMAL)]
    schema = pq.read_table(io.BytesIO(b"".join(encode([], columns, Format.PARQUET)))).schema
    kinds = [str(field.type) for field in schema]
    amount = "decimal128(38, 12)"
    assert kinds == ["string", "int64", "bool", amount, "timestamp[us, tz=UTC]", amount]


def test_csv_reads_as_people_expect() -> None:
    data = whole(
        Format.CSV,
        [('a "b", c', 5, True, units_of("0.000000000001"), NOON), (None, 1, False, None, NOON)],
    )
    assert list(csv.reader(io.StringIO(data.decode()))) == [
        ["name", "count", "late", "amount", "at"],
        ['a "b", c', "5", "true", "0.000000000001", "2026-02-28T12:00:00Z"],
        ["", "1", "false", "", "2026-02-28T12:00:00Z"],
    ]


@pytest.mark.parametrize("evil", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx"])
def test_a_spreadsheet_runs_nothing(evil: str) -> None:
    line = whole(Format.CSV, [(evil, 1, True, 1, NOON)]).decode().splitlines()[1]
    assert line.startswith(("'", "\"'"))


@pytest.mark.parametrize("form", list(Format))
def test_it_is_streamed_and_no_rows_are_a_file_too(form: Format) -> None:
    many = ((f"n{i}", i, False, i, NOON) for i in range(2 * BATCH_ROWS + 1))
    chunks = list(encode(many, COLUMNS, form))
    assert len([chunk for chunk in chunks if chunk]) >= 3
    empty = whole(form, [])
    if form is Format.PARQUET:
        assert pq.read_table(io.BytesIO(empty)).num_rows == 0
    elif form is Format.CSV:
        assert empty == b"name,count,late,amount,at\r\n"


def test_parquet_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert format_of("parquet") is Format.PARQUET
    monkeypatch.setattr("core.extras.find_spec", lambda _: None)
    with pytest.raises(
        MissingExtra, match="An export as Parquet needs the extra 'parquet'"
    ) as told:
        format_of("parquet")
    assert told.value.next_step == "Run: pip install 'tollhouse[parquet]'"
    assert format_of("csv") is Format.CSV
