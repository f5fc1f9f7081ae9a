"""The tables of FOCUS by version and dataset: names, types, null and values, in their order.

They are data: `columns/<dataset>-<version>.csv`. A version has the datasets for which there is a file.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from billing.exports.formats import Column, Kind
from core.errors import BadRequest

VERSIONS = ("1.2", "1.3", "1.4", "1.5-draft")
DEFAULT_VERSION = "1.4"
FIRST_VERSION = "1.2"  # of schedules that name none
COST_AND_USAGE, BILLING_PERIOD = "cost-and-usage", "billing-period"
INVOICE_DETAIL, CONTRACT_COMMITMENT = "invoice-detail", "contract-commitment"
DATASETS = (COST_AND_USAGE, BILLING_PERIOD, INVOICE_DETAIL, CONTRACT_COMMITMENT)
_KINDS = {
    "text": Kind.TEXT,
    "json": Kind.TEXT,
    "money": Kind.UNITS,
    "quantity": Kind.DECIMAL,
    "moment": Kind.MOMENT,
    "whole": Kind.WHOLE,
}


@dataclass(frozen=True, slots=True)
class FocusColumn:
    name: str
    type: str  # text | json | money | quantity | moment | whole
    nullable: bool
    values: tuple[str, ...]  # allowed; empty: any

    @property
    def column(self) -> Column:
        return Column(self.name, _KINDS[self.type])


@dataclass(frozen=True, slots=True)
class FocusTable:
    """The columns of a dataset in one version, or those of them that a reader asked for."""

    version: str
    dataset: str
    columns: tuple[FocusColumn, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.columns)

    @property
    def written(self) -> tuple[Column, ...]:
        return tuple(each.column for each in self.columns)


def choose(version: str = "", dataset: str = "", columns: Sequence[str] = ()) -> FocusTable:
    """The table by version (1.4 without one), dataset (cost and usage) and columns (all). BadRequest
    names what does not exist."""
    version, dataset = version or DEFAULT_VERSION, dataset or COST_AND_USAGE
    if version not in VERSIONS:
        raise BadRequest(
            f"There is no FOCUS {version[:40]!r} here; the versions are {', '.join(VERSIONS)}.",
            next_step="Choose one of them.",
            param="focus_version",
        )
    if dataset not in DATASETS:
        raise BadRequest(
            f"FOCUS has no dataset {dataset[:40]!r}; it must be one of {', '.join(DATASETS)}.",
            param="dataset",
        )
    table = table_of(version, dataset)
    if table is None:
        having = [each for each in VERSIONS if table_of(each, dataset)]
        raise BadRequest(
            f"FOCUS {version} has no dataset {dataset}; it is in {', '.join(having)}.",
            next_step="Choose one of these versions.",
            param="dataset",
        )
    if not columns:
        return table
    known = {each.name: each for each in table.columns}
    unknown = [each for each in columns if each not in known]
    if unknown:
        raise BadRequest(
            f"FOCUS {version}, {dataset}, has no column {unknown[0][:80]!r}.",
            next_step="`tollhouse export list` names the columns.",
            param="columns",
        )
    if len(set(columns)) < len(columns):
        raise BadRequest("columns names a column twice.", param="columns")
    return FocusTable(version, dataset, tuple(known[each] for each in columns))


@cache
def table_of(version: str, dataset: str) -> FocusTable | None:
    """All columns; None where the version has no such dataset."""
    file = files("billing.exports.focus").joinpath("columns", f"{dataset}-{version}.csv")
    if not file.is_file():
        return None
    rows = csv.DictReader(io.StringIO(file.read_text()))
    columns = [
        FocusColumn(
            row["column"],
            row["type"],
            row["null"] == "yes",
            tuple(each for each in row["values"].split("|") if each),
        )
        for row in rows
    ]
    return FocusTable(version, dataset, tuple(columns))
