"""Reconciliation: the last audits from receipts to invoices, with their differences."""

from collections.abc import Iterator, Sequence
from typing import Any

from sqlalchemy import select
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.audit.tables import AuditRun
from core.money import decimal_of
from dashboards.formats import moment
from dashboards.page_data import Form, PageData, Tile, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    operator_of,
    redirect_with_notice,
    wants_csv,
)
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/reconciliation"
_COUNTS = ("count", "input_tokens", "cached_tokens", "output_tokens", "waived_tokens")
_STEP = (
    "Receipts also hold the tokens of warm-ups, of batch lines that run again, and of attempts that"
    " another engine answered. Nobody pays for them, so their events hold none, and the sums differ."
)
_WHY = "Where a step has another count than the one before, and what that is."
# What a step holds beyond the next one, and what the next one lacks, without a difference in money.
_REASONS = {
    "events": "receipts of warm-ups, repeated batch lines and second attempts, which nobody pays for;"
    " requests that upstreams answered have events and no receipt",
    "charges": "events that are parked or wait to be rated",
}
STEPS = [
    Column("step", "Step", about=_STEP),
    *(Column(name, name.replace("_", " ").capitalize(), "whole") for name in _COUNTS),
    Column("units", "Amount", "figure", "In major units. The entries of the ledger sum to zero."),
    Column("why", "What differs", about=_WHY),
]
DIFFERENCES = [
    Column("check", "Between"),
    Column("kind", "Kind", "badge"),
    Column("message", "Description"),
    Column("count", "Count", "whole"),
    Column("units", "Amount", "figure", "In major units of the currency."),
    Column("requests", "First request ids", "code"),
]
RUNS = [
    Column("at", "Run", "moment"),
    Column("state", "Outcome", "badge"),
    Column("lost", "Lost", "whole"),
    Column("duplicated", "Duplicated", "whole"),
    Column("error", "Ledger error", "figure"),
    Column("pending", "Not yet rated", "whole"),
    Column("parked", "Parked", "whole"),
]
_NOT_YET = "No audit has run yet. It runs every hour, and on the page Reconciliation now."


def page_of(request: Request) -> Response:
    viewer, deps = operator_of(request, "operations"), deps_of(request)
    with deps.database.read() as session:
        runs = session.scalars(select(AuditRun).order_by(AuditRun.id.desc()).limit(48)).all()
    last = runs[0] if runs else None
    report: dict[str, Any] = last.report if last else {}
    differences = Table(
        "Differences",
        DIFFERENCES,
        [_difference(each) for each in report.get("differences", [])],
        totals=False,
        empty="None: every request is charged once and posted. Counts that differ are explained below.",
    )
    if wants_csv(request):
        return differences.csv("differences")
    steps = [
        {**dict.fromkeys(_COUNTS), **sums, "step": name, "units": _amount(sums), "why": why}
        for name, sums, why in _explained(report.get("steps", {}))
    ]
    now = Form(PATH, "Audit now", {"act": "audit"}, about="Compares all days that are not closed.")
    page_data = PageData(
        "Reconciliation",
        "Compares receipts, usage events, charges, ledger and invoices, each with the previous step.",
        tiles=_tiles(report, last),
        actions=[now] if deps.auth.may(viewer, "operations", "write") else [],
        tables=[
            differences,
            Table("Counts and sums of each step", STEPS, steps, totals=False),
            runs_table(runs),
        ]
        if last
        else [],
    )
    return show(request, page_data)


def _amount(sums: dict[str, Any]) -> str | None:
    units = sums.get("units")
    return None if units is None else decimal_of(int(units))


def _explained(steps: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any], str]]:
    there: int | None = None
    for name, sums in steps.items():
        here, why = sums.get("count"), ""
        if name in _REASONS and here is not None and there is not None and here != there:
            how = f"{grouped(abs(there - here))} {'fewer' if there > here else 'more'}"
            why = f"{how} than the step before: {_REASONS[name]}"
        yield name, sums, why
        there = here


def runs_table(runs: Sequence[AuditRun], title: str = "Latest runs") -> Table:
    rows = [_run(each) for each in runs]
    step = (PATH, "Open Reconciliation")
    return Table(title, RUNS, rows, totals=False, empty=_NOT_YET, next_step=step)


def _tiles(report: dict[str, Any], last: AuditRun | None) -> list[Tile]:
    if last is None:
        return [Tile("Last audit", "–", "No audit has run yet. It runs every hour.")]
    differences = len(report["differences"])
    zero = "good" if last.clean else "bad"
    return [
        Tile("Differences", grouped(differences), "must be 0", state=zero),
        Tile("Lost", grouped(report["lost"]), about="In one step but not in the next."),
        Tile(
            "Duplicated",
            grouped(report["duplicated"]),
            about="More often in one step than in the previous one.",
        ),
        Tile(
            "Ledger error",
            report["ledger_error"],
            about="Sum of the differences in amount between steps.",
        ),
        Tile("Last audit", moment(last.at)[11:], f"{moment(last.at)} UTC"),
    ]


def _difference(each: dict[str, Any]) -> dict[str, Any]:
    plain = {name: each[name] for name in ("check", "kind", "message", "count", "units")}
    shown = {"requests": " ".join(each["request_ids"][:3]), "units": _amount(each)}
    return plain | shown


def _run(each: AuditRun) -> dict[str, Any]:
    plain = {name: each.report[name] for name in ("lost", "duplicated", "pending", "parked")}
    state = "clean" if each.clean else "differs"
    return plain | {"at": each.at, "state": state, "error": each.report["ledger_error"]}


def _audit(request: Request, _given: Fields) -> Response:
    operator_of(request, "operations", "write")
    ended = deps_of(request).backend.audit()
    return redirect_with_notice(request, PATH, "audit-done" if ended else "audit-runs")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(PATH, form_handler(page_of, audit=_audit), methods=["POST"]),
]
