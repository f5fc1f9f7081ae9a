"""Which versions there are, what is refused, and how a schedule of FOCUS delivers."""

import csv
import io
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from billing.exports import schedules
from billing.exports.encoding import chunks_of, export_of
from billing.exports.focus.metadata import schema_json
from billing.exports.focus.tables import DATASETS, VERSIONS, choose, table_of
from billing.exports.formats import Format
from billing.exports.subjects import Period
from billing.exports.tables import ExportJob, ExportSchedule
from billing.exports.views import schedule_json
from billing.invoicing import invoice_run
from billing.stores import DirectoryStore
from core.errors import BadRequest
from core.tenants.scope import scope_of_operator
from tests.billing.conftest import START, Deployment
from tests.conftest import SPECS

NAMES = {
    "cost-and-usage": "CostAndUsage",
    "billing-period": "BillingPeriod",
    "invoice-detail": "InvoiceDetail",
    "contract-commitment": "ContractCommitment",
}
TYPES = {"text": "String", "json": "JSON", "moment": "Date/Time", "money": "Decimal"}


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        (
            {"version": "1.7"},
            "focus_version",
            "no FOCUS '1.7' here; the versions are 1.2, 1.3, 1.4",
        ),
        ({"dataset": "price-list"}, "dataset", "no dataset 'price-list'"),
        ({"version": "1.2", "dataset": "invoice-detail"}, "dataset", "it is in 1.4, 1.5-draft"),
        ({"columns": ("BilledCost", "Colour")}, "columns", "no column 'Colour'"),
        ({"columns": ("BilledCost", "BilledCost")}, "columns", "twice"),
    ],
)
def test_what_does_not_exist_is_refused_by_name(
    given: dict[str, Any], field: str, told: str
) -> None:
    with pytest.raises(BadRequest, match=told) as refused:
        export_of("focus", **given)
    assert refused.value.param == field
    with pytest.raises(BadRequest, match=r"is of FOCUS exports; this one is of usage\."):
        export_of("usage", **given)


def test_the_columns_are_those_of_the_published_version() -> None:
    """Every mandatory one, with its type, null and values; what is ours begins with x_."""
    path = SPECS / "focus-1.4-columns.csv"
    if not path.exists():
        pytest.skip(f"no FOCUS columns at {path}; TOLLHOUSE_SPECS_DIR names their folder")
    published = list(csv.DictReader(path.read_text().splitlines()))
    for dataset in DATASETS:
        ours = {each.name: each for each in choose("1.4", dataset).columns}
        theirs = {row["column"]: row for row in published if row["dataset"] == NAMES[dataset]}
        assert [name for name in ours if not name.startswith("x_")] == sorted(
            ours.keys() & theirs.keys()
        )
        mandatory = {name for name, row in theirs.items() if row["feature_level"] == "Mandatory"}
        assert mandatory <= ours.keys()
        for name in ours.keys() & theirs.keys():
            row, column = theirs[name], ours[name]
            assert TYPES.get(column.type, "Decimal") == row["data_type"], name
            assert column.nullable <= (row["allows_nulls"] == "True"), name
            allowed = {each for each in row["allowed_values"].split("|") if each}
            assert set(column.values) <= allowed and bool(column.values) == bool(allowed), name


def test_each_version_is_data() -> None:
    having = {
        version: [dataset for dataset in DATASETS if table_of(version, dataset)]
        for version in VERSIONS
    }
    assert having == {
        "1.2": ["cost-and-usage"],
        "1.3": ["cost-and-usage", "contract-commitment"],
        "1.4": list(DATASETS),
        "1.5-draft": list(DATASETS),
    }
    newer, older = set(choose("1.4").names), set(choose("1.3").names)
    assert older - newer == {"ProviderName", "PublisherName"}
    assert newer - older == {"InvoiceDetailId"}
    assert set(choose("1.5-draft").names) - newer == {"CredentialId", "PrincipalId"}
    assert schema_json(choose())["FocusVersion"] == "1.4"


def test_a_reader_chooses_columns_and_their_order(lite: Deployment) -> None:
    lite.record(lite.event())
    lite.rate()
    invoice_run.run(lite.database, lite.clock)
    export = export_of("focus", columns=("SkuId", "BilledCost"))
    span = Period(START, START + timedelta(days=31))
    with lite.database.read() as session:
        text = b"".join(chunks_of(session, export, Format.CSV, None, span)).decode()
    lines = list(csv.reader(io.StringIO(text)))
    assert lines[0] == ["SkuId", "BilledCost"] and lines[1][0] == "demo/input"
    ids = [each["ColumnName"] for each in schema_json(export.table)["ColumnDefinition"]]  # type: ignore[arg-type]
    assert ids == ["SkuId", "BilledCost"]


def _scheduled(made: Deployment, folder: Path, **changes: Any) -> str:
    given = {"form": "csv", "destination": "x", "every": "day", "delay_hours": 0, **changes}
    with made.database.transaction() as session:
        return schedules.schedule(
            session, made.clock, lambda _: DirectoryStore(folder), **{"what": "focus", **given}
        ).id


def _tick(made: Deployment, folder: Path) -> int:
    with made.database.transaction() as session:
        schedules.create_due_jobs(session, made.clock.now())
    done, failed = schedules.run_waiting(
        made.database, made.clock, lambda _: DirectoryStore(folder), scope_of_operator
    )
    assert failed == 0
    return done


def test_a_period_is_one_file_that_is_overwritten_until_it_is_closed(
    deployment: Deployment, tmp_path: Path
) -> None:
    made, tmp_path = deployment, tmp_path / "delivered"
    schedule = _scheduled(made, tmp_path, tenant_id="acme")
    january = tmp_path / "focus-1.4-cost-and-usage-acme-20260101T0000-20260201T0000.csv"
    sizes = []
    for _ in range(14):
        made.record(made.event())
        made.rate()
        made.clock.advance(days=3)
        invoice_run.run(made.database, made.clock, current=False)
        assert _tick(made, tmp_path) == 1
        sizes.append(january.stat().st_size)
    assert sizes[:10] == sorted(set(sizes[:10])), "it grows with each delivery"
    assert len(set(sizes[11:])) == 1, "and is closed"
    files = sorted(each.name for each in tmp_path.iterdir())
    assert files == [
        january.name,
        "focus-1.4-cost-and-usage-acme-20260201T0000-20260301T0000.csv",
        "focus-1.4-cost-and-usage-acme-metadata.json",
    ]
    about = json.loads((tmp_path / files[2]).read_text())
    sectors = about["Recency"]["TimeSectors"]
    assert [each["TimeSectorComplete"] for each in sectors] == [True, False]
    assert about["DatasetInstance"]["DatasetInstanceId"] == schedule
    assert about["Schema"] == schema_json(choose())
    before = january.stat().st_mtime_ns
    made.clock.advance(days=1)
    _tick(made, tmp_path)
    assert january.stat().st_mtime_ns == before, "a closed period is not written again"


def test_days_that_were_missed_are_one_delivery(lite: Deployment, tmp_path: Path) -> None:
    _scheduled(lite, tmp_path)
    lite.record(lite.event())
    lite.rate()
    lite.clock.advance(days=9)
    assert _tick(lite, tmp_path) == 1
    with lite.database.read() as session:
        (job,) = session.query(ExportJob).all()
        assert (job.ends_at, job.status) == (START + timedelta(days=9), "done")
        assert str(job.address).endswith("focus-1.4-cost-and-usage-all-metadata.json")


def test_a_schedule_of_before_keeps_1_2_until_it_is_changed(
    lite: Deployment, tmp_path: Path
) -> None:
    tmp_path /= "delivered"
    made = _scheduled(lite, tmp_path)
    with lite.database.transaction() as session:
        row = session.get_one(ExportSchedule, made)
        row.options = {"delay_hours": 0}
        assert (schedule_json(row)["focus_version"], row.what) == ("1.2", "focus")
    lite.record(lite.event())
    lite.rate()
    lite.clock.advance(days=1)
    _tick(lite, tmp_path)
    with lite.database.transaction() as session:
        row = session.get_one(ExportSchedule, made)
        schedules.change_table(row, export_of("focus", "1.3", "", ("InvoiceId", "BilledCost")))
        assert schedule_json(row)["columns"] == ["InvoiceId", "BilledCost"]
    lite.clock.advance(days=1)
    _tick(lite, tmp_path)
    names = {each.name.partition("-cost")[0] for each in tmp_path.iterdir()}
    assert names == {"focus-1.2", "focus-1.3"}
    (new,) = tmp_path.glob("focus-1.3-*.csv")
    assert new.read_text().splitlines()[0] == "InvoiceId,BilledCost"
    with lite.database.transaction() as session:
        usage = schedules.schedule(
            session,
            lite.clock,
            lambda _: DirectoryStore(tmp_path),
            what="usage",
            form="csv",
            destination="x",
            every="day",
        )
        with pytest.raises(BadRequest, match="exports usage, which has no FOCUS version"):
            schedules.change_table(usage, export_of("focus"))
