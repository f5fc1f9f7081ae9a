"""The ledger of all tenants: trial balance, earned and deferred revenue, transactions with search."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing import journal, recognition
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.tables import Column, Table

PATH = "/operator/ledger"
_MOST = 200
_BALANCE = [
    Column("account", "Account"),
    Column("code", "Code", "code"),
    Column("currency", "Currency"),
    Column("debit", "Debit", "money"),
    Column("credit", "Credit", "money"),
    Column("balance", "Balance", "money", "Debits less credits; all balances sum to zero."),
]
_MONTHS = [
    Column("month", "Month"),
    Column("currency", "Currency"),
    Column("units", "Earned", "money", "Fees billed ahead, recognised in proportion to time."),
]
_TRANSACTIONS = [
    Column("at", "Time"),
    Column("tenant", "Tenant"),
    Column("kind", "Kind", "badge"),
    Column("reference", "Reference", "code"),
    Column("account", "Account"),
    Column("debit", "Debit", "money"),
    Column("credit", "Credit", "money"),
    Column("memo", "Memo"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps, search = deps_of(request), request.query_params.get("q", "")[:100]
    with deps.database.read() as session:
        balances = journal.trial_balance(session)
        months = recognition.schedule(session)
        found = journal.transactions(session, search=search, limit=_MOST)
    table = Table(
        f"Transactions with {search}" if search else f"The newest {_MOST} transactions",
        _TRANSACTIONS,
        [row for each in found for row in _entries(each)],
        totals=False,
        empty="No transaction matches." if search else "Nothing is posted yet.",
    )
    if wants_csv(request):
        return table.csv("ledger")
    page_data = PageData(
        "Ledger",
        "The entries of all tenants: double entry and append-only.",
        actions=[Form(PATH, "Search", inputs=[_search(search)], method="get")],
        tables=[
            Table(
                "Trial balance",
                _BALANCE,
                [_plain(each, ("debit", "credit", "balance")) for each in balances],
                totals=False,
                empty="Nothing is posted yet.",
            ),
            Table(
                "Fees billed ahead, by the month that earns them",
                _MONTHS,
                months,
                totals=False,
                empty="No plan is billed ahead.",
            ),
            table,
        ],
    )
    return show(request, page_data)


def _search(given: str) -> Input:
    hint = "part of a reference, memo, kind or tenant"
    return Input("q", "Transactions with", value=given, required=False, hint=hint)


def _plain(row: dict[str, Any], amounts: tuple[str, ...]) -> dict[str, Any]:
    return row | {name: int(row[name]["units"]) for name in amounts}


def _entries(transaction: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for entry in transaction["entries"]:
        units = int(entry["amount"]["units"])
        rows.append(
            transaction
            | {
                "at": transaction["at"][:19].replace("T", " "),
                "account": entry["account"],
                "currency": entry["amount"]["currency"],
                "debit": units if units > 0 else None,
                "credit": -units if units < 0 else None,
            }
        )
    return rows


ROUTES = [Route(PATH, page_of)]
