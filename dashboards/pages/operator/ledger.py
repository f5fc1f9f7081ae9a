"""The ledger of all tenants: trial balance, earned and deferred revenue, transactions with search."""

from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.invoicing import recognition
from billing.ledger import account_statement, journal
from billing.ledger.account_statement import StatementQuery
from core.tenants import organisations
from dashboards.filters import start_of_day
from dashboards.formats import money
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, root_of, wants_csv
from dashboards.tables import Column, Table

PATH = "/operator/ledger"
_MOST = 200
_STATEMENT = [
    Column("at", "Time"),
    Column("tenant", "Tenant"),
    Column("kind", "Kind", "badge"),
    Column("reference", "Reference", "code"),
    Column("debit", "Debit", "exact"),
    Column("credit", "Credit", "exact"),
    Column("balance", "Balance", "exact", "After the entry; credits are negative."),
    Column("memo", "Memo"),
]
_BALANCE = [
    Column("account", "Account", link="href"),
    Column("code", "Code", "code"),
    Column("currency", "Currency"),
    Column("debit", "Debit", "exact"),
    Column("credit", "Credit", "exact"),
    Column("balance", "Balance", "exact", "Debits less credits; all balances sum to zero."),
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
    Column("debit", "Debit", "exact"),
    Column("credit", "Credit", "exact"),
    Column("memo", "Memo"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    deps, search = deps_of(request), request.query_params.get("q", "")[:100]
    root = root_of(request)
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
        next_step=(PATH, "Show all") if search else None,
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
                _balances(balances, root),
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


def _balances(found: list[dict[str, Any]], root: str) -> list[dict[str, Any]]:
    """Each account, and below those of a currency their sums."""
    rows: list[dict[str, Any]] = []
    for currency, own in groupby(found, key=itemgetter("currency")):
        accounts = [_plain(each, _SIDES) for each in own]
        rows += [
            each | {"href": f"{root}{PATH}/{each['account']}?currency={currency}"}
            for each in accounts
        ]
        sums = {side: sum(each[side] for each in accounts) for side in _SIDES}
        rows.append({"account": "Total", "code": "", "currency": currency, "href": ""} | sums)
    return rows


_SIDES = ("debit", "credit", "balance")


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


def account_page(request: Request) -> Response:
    """An account's entries with the running balance."""
    operator_of(request, "operations")
    deps = deps_of(request)
    given = request.query_params
    with deps.database.read() as session:
        tenant = given.get("tenant", "").strip()
        query = account_statement.check(
            StatementQuery(
                request.path_params["account"],
                given.get("currency", "USD").upper(),
                organisations.tenant_named(session, tenant).id if tenant else "",
                start_of_day("from", given.get("from", "")),
                _end_of_day(given.get("to", "")),
            )
        )
        if wants_csv(request):
            lines = [_statement_row(each) for each in account_statement.all_lines(session, query)]
            table = Table(query.account, _STATEMENT, lines, query.currency, totals=False)
            return table.csv(f"ledger-{query.account}")
        after = given.get("after", "")
        found = account_statement.read(
            session,
            query,
            after=int(after) if (after.isascii() and after.isdecimal() and len(after) < 19) else 0,
            limit=_MOST,
        )
    table = Table(
        f"Entries of {query.account}",
        _STATEMENT,
        [_statement_row(each) for each in found["data"]],
        query.currency,
        totals=False,
        empty="No entry in this period.",
    )
    opening, closing = (int(found[name]["units"]) for name in ("opening", "closing"))
    inputs = [
        Input("tenant", "Tenant", value=tenant, required=False, hint="default: all together"),
        Input("currency", "Currency", value=query.currency),
        Input("from", "From", "date", given.get("from", ""), required=False),
        Input("to", "To (inclusive)", "date", given.get("to", ""), required=False),
    ]
    path = f"{PATH}/{query.account}"
    page_data = PageData(
        f"Account {query.account}",
        "Its entries by time, with the balance after each. Debits are positive.",
        tiles=[
            Tile("Balance before", money(opening, query.currency)),
            Tile("Balance after", money(closing, query.currency)),
        ],
        actions=[Form(path, "Show", inputs=inputs, method="get")],
        tables=[table],
        back=(PATH, "Ledger"),
        link=(f"{path}?{urlencode({**dict(given), 'format': 'csv'})}", "Download CSV"),
        pager=[("Later", f"?{urlencode({**dict(given), 'after': found['next']})}")]
        if found["next"]
        else [],
    )
    return show(request, page_data)


def _end_of_day(written: str) -> datetime | None:
    start = start_of_day("to", written)
    return start + timedelta(1) if start is not None else None


def _statement_row(line: dict[str, Any]) -> dict[str, Any]:
    debit, credit = int(line["debit"]["units"]), int(line["credit"]["units"])
    return line | {
        "at": line["at"][:19].replace("T", " "),
        "debit": debit or None,
        "credit": credit or None,
        "balance": int(line["balance"]["units"]),
    }


ROUTES = [Route(PATH, page_of), Route(f"{PATH}/{{account}}", account_page)]
