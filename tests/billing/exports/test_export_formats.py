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

from billing.exports import encoding
from billing.exports.encoding import format_of
from billing.exports.focus.tables import choose
from billing.exports.formats import BATCH_ROWS, Column, Format, Kind, encode
from billing.exports.subjects import SUBJECTS
from core.errors import BadRequest, MissingExtra
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


def test_texts_amounts_and_times_as_they_are_written() -> None:
    columns = (
        Column("t"),
        Column("w", Kind.WHOLE),
        Column("d", Kind.DECIMAL),
        Column("f", Kind.FLAG),
        Column("u", Kind.UNITS),
        Column("m", Kind.MOMENT),
    )
    zone = datetime.fromisoformat("2026-01-01T01:00:00.000005+01:00")
    rows = [
        ("=x", 1, 2 * 10**12, True, 15 * 10**11, zone),
        (None,) * 6,
        ("a", 0, -3 * 10**12, False, -1, datetime(2026, 1, 1, tzinfo=UTC)),
    ]

    def _text(form: Format) -> str:
        return b"".join(encode(rows, columns, form)).decode()

    assert _text(Format.CSV) == (
        "t,w,d,f,u,m\r\n'=x,1,2.0,true,1.5,2026-01-01T00:00:00.000005Z\r\n,,,,,\r\n"
        "a,0,-3.0,false,-0.000000000001,2026-01-01T00:00:00Z\r\n"
    )
    assert _text(Format.JSONL) == (
        '{"t":"=x","w":1,"d":"2.0","f":true,"u":"1.5","m":"2026-01-01T00:00:00.000005Z"}\n'
        '{"t":null,"w":null,"d":null,"f":null,"u":null,"m":null}\n'
        '{"t":"a","w":0,"d":"-3.0","f":false,"u":"-0.000000000001","m":"2026-01-01T00:00:00Z"}\n'
    )
    kinds = [each.media_type for each in Format]
    assert kinds == [
        "text/csv; charset=utf-8",
        "application/x-ndjson",
        "application/vnd.apache.parquet",
    ]


def test_names_and_formats_of_exports() -> None:
    assert encoding.NAMES == ("usage", "charges", "invoices", "ledger", "focus")
    assert [each.name for each in encoding.export_of("focus").columns] == list(choose().names)
    assert encoding.export_of("ledger").columns == SUBJECTS["ledger"].columns
    for ask in (encoding.check_name, encoding.export_of):
        with pytest.raises(
            BadRequest, match="what is 'all'; it must be one of usage, charges"
        ) as told:
            ask("all")
        assert told.value.param == "what"
    with pytest.raises(
        BadRequest, match="format is 'xls'; it must be one of csv, jsonl, parquet"
    ) as told:
        encoding.format_of("xls")
    assert told.value.param == "format"
    kinds = {each.name: each.kind for each in encoding.export_of("ledger").columns}
    assert kinds == {
        "entry_id": Kind.WHOLE,
        "transaction_id": Kind.TEXT,
        "tenant_id": Kind.TEXT,
        "kind": Kind.TEXT,
        "reference": Kind.TEXT,
        "at": Kind.MOMENT,
        "reverses_id": Kind.TEXT,
        "memo": Kind.TEXT,
        "account": Kind.TEXT,
        "units": Kind.UNITS,
        "currency": Kind.TEXT,
    }
    flags = [each.name for each in encoding.export_of("usage").columns if each.kind is Kind.FLAG]
    assert flags == ["streamed"]
