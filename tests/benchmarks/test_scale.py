"""docs/scale.md: its DDL runs on a migrated PostgreSQL, and its figures are those that were measured."""

import json
import re
from pathlib import Path

import psycopg
import pytest

from benchmarks.scale import Measured, Prices, on_paper
from core.database import Database

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results" / "scale-epyc-2core.jsonl"
# Citus's functions as its reference declares them, without what they do.
_CITUS = """
create table distributed (name regclass, by text, beside text);
create function create_distributed_table(
    table_name regclass, distribution_column text, colocate_with text default 'default'
) returns void language sql as
    'insert into distributed values (table_name, distribution_column, colocate_with)';
create function create_reference_table(table_name regclass) returns void language sql as '';
"""
_KEYS = """
select d.name::text, i.indexrelid::regclass::text from distributed d
join pg_index i on i.indrelid = d.name and i.indisunique
where not exists (select from pg_attribute a where a.attrelid = d.name and a.attname = d.by
    and a.attnum = any (i.indkey))
"""


def layout() -> str:
    [found] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(found)


def test_the_layout_for_citus_is_valid(postgres_database: Database) -> None:
    url = postgres_database.url.replace("postgresql+psycopg", "postgresql")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_CITUS)
        connection.execute(layout())
        tables = connection.execute("select name::text, by, beside from distributed").fetchall()
        assert len(tables) == layout().count("create_distributed_table(") == 5
        assert {by for _, by, _ in tables} == {"tenant_id"}
        assert {beside for _, _, beside in tables} == {"default", "usage_events"}
        # A unique key without the column of distribution is what Citus refuses.
        assert connection.execute(_KEYS).fetchall() == []
        connection.execute("insert into distributed values ('projects', 'tenant_id', '')")
        assert connection.execute(_KEYS).fetchall() != []  # the check can fail


def test_the_figures_of_the_page_are_those_of_the_results() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    values = {line["benchmark"].removeprefix("scale."): line["value"] for line in lines}
    rows = re.findall(r"^\| `(\w+)` \| ([\d,.]+) \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) >= 12
    for name, shown in rows:
        number = float(shown.replace(",", ""))
        assert number == pytest.approx(values[name], rel=0.02), name


def test_a_billion_a_day_is_computed_from_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 2 x 5 us x 1e9 / 86,400 s = 0.1157 cores; 100 bytes x 1e9 = 100 GB a day; kept for 30.4
    days at 0.10 a month, that is 10 a day."""
    measured = Measured({"a": 1.0}, {"in": 5e-6, "out": 5e-6}, {"store": 100.0})
    on_paper(measured, Prices(core_hour=0.5, gb_month=0.10), 30.4, {})  # type: ignore[arg-type]
    found = {
        line["benchmark"]: line["value"]
        for line in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert found["scale.billion_cores"] == pytest.approx(0.11574, rel=1e-3)
    assert found["scale.billion_cores_at_peak"] == pytest.approx(0.34722, rel=1e-3)
    assert found["scale.billion_store"] == 100.0
    assert found["scale.billion_store_money"] == pytest.approx(10.0, rel=1e-6)
    assert found["scale.billion_cores_money"] == pytest.approx(0.11574 * 24 * 0.5, rel=1e-3)
