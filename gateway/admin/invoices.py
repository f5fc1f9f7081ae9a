"""`tollhouse invoice`: creates, shows and settles invoices."""

import argparse
import sys
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from sqlalchemy import select

from billing.adjustments import money_acts
from billing.adjustments.act_requests import ActRequest, Kind
from billing.invoicing import credit_notes, invoice_run, invoices, printing
from billing.invoicing.tables import Invoice
from billing.invoicing.views import credit_note_json, invoice_json, invoice_summary
from billing.pricing.exchange_rates import Converter
from billing.reports import receivables, revenue
from billing.usage.day_range import Range
from core.errors import BadRequest
from core.ids import new_id
from core.money import decimal_of, format_minor
from gateway.admin.adjustments.command import submit
from gateway.admin.console import CommandContext, command_context, tenant_id_of, units_of_amount
from gateway.admin.output import add_json, show
from gateway.metering.spool_watch import wait_until_shipped
from gateway.serving.payments import make_taxes

HELP = "create, show and settle invoices"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    run = verbs.add_parser("run", help="rate usage, finalise due invoices, draft the others")
    run.add_argument("--tenant", help="name or id; default: all tenants")
    run.add_argument("--closed-only", action="store_true", help="do not draft the current period")
    run.add_argument(
        "--now", action="store_true", help="finalise ended periods without waiting for late usage"
    )
    run.set_defaults(run=_run)
    found = verbs.add_parser("list", help="list invoices, newest first")
    found.add_argument("--tenant", help="name or id; default: all tenants")
    found.set_defaults(run=_list)
    aged = verbs.add_parser("ageing", help="open amounts of all tenants by days past due")
    aged.add_argument("--reporting", metavar="CURRENCY", help="all at the rate of today")
    aged.set_defaults(run=_ageing)
    earned = verbs.add_parser("revenue", help="used, billed and collected amounts of all tenants")
    earned.add_argument("--from", dest="first", metavar="DATE", help="UTC; default: this month")
    earned.add_argument("--to", dest="last", metavar="DATE", help="inclusive; default: today")
    earned.add_argument("--reporting", metavar="CURRENCY", help="all at the rates of the days")
    earned.set_defaults(run=_revenue)
    one = verbs.add_parser("show", help="show one invoice with its lines")
    one.add_argument("invoice", help="id or number")
    one.set_defaults(run=_show)
    pay = verbs.add_parser("pay", help="record a payment received outside the payment provider")
    pay.add_argument("invoice", help="id or number")
    pay.add_argument("--amount", help="in major units; default: the open amount")
    pay.add_argument("--reference", required=True, help="bank reference; a repeated one is ignored")
    pay.set_defaults(run=_pay)
    void = verbs.add_parser("void", help="void an unpaid invoice")
    void.add_argument("invoice", help="id or number")
    void.add_argument("--reason", required=True)
    void.set_defaults(run=_void)
    lost = verbs.add_parser("write-off", help="write off the open amount of an invoice")
    lost.add_argument("invoice", help="id or number")
    lost.set_defaults(run=_write_off)
    note = verbs.add_parser("credit-note", help="show or print a credit note")
    note.add_argument("number", help="id or number")
    note.set_defaults(run=_credit_note)
    for each in (one, note):
        each.add_argument("--html", type=Path, metavar="FILE", help="write a printable page")
        each.add_argument("--pdf", type=Path, metavar="FILE", help="write a PDF")
    for each in (run, found, aged, earned, one, pay, void, lost, note):
        add_json(each)


def _run(arguments: argparse.Namespace) -> int:
    with command_context() as tools, Progress(console=Console(stderr=True), transient=True) as bar:
        wait_until_shipped(tools.settings)
        chosen = None
        if arguments.tenant:
            with tools.database.read() as session:
                chosen = [tenant_id_of(session, arguments.tenant)]
        shown = bar.add_task("invoices", total=None)
        result = invoice_run.run(
            tools.database,
            tools.clock,
            chosen,
            current=not arguments.closed_only,
            grace=not arguments.now,
            progress=lambda done, total: bar.update(shown, completed=done, total=total),
            taxes=make_taxes(tools.settings, tools.clock),
        )
        with tools.database.read() as session:
            rows = [session.get_one(Invoice, each) for each in result.all_ids]
            rows.sort(key=lambda row: (row.tenant_id, row.period_start))
            report: dict[str, Any] = {
                "finalised": len(result.finalised),
                "drafted": len(result.drafted),
                "unchanged": len(result.unchanged),
                "failed": result.failed,
            }
            if arguments.json:
                report["invoices"] = [invoice_json(session, row) for row in rows]
                show(report, as_json=True)
            else:
                show([invoice_summary(row) for row in rows], as_json=False, title="invoices")
    for tenant_id, reason in result.failed.items():
        print(f"{tenant_id}: {reason}", file=sys.stderr)
    return 1 if result.failed else 0


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        query = select(Invoice).order_by(Invoice.period_start.desc(), Invoice.tenant_id).limit(500)
        if arguments.tenant:
            query = query.where(Invoice.tenant_id == tenant_id_of(session, arguments.tenant))
        rows = [invoice_summary(row) for row in session.scalars(query)]
        show(rows, as_json=arguments.json, title="invoices")
    return 0


def _ageing(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        now = tools.clock.now()
        converter = None
        if arguments.reporting:
            converter = Converter.load(session, arguments.reporting, now.date(), now.date())
        rows = receivables.ageing(session, now, converter)
    if not arguments.json:
        rows = [
            {
                name: value if name == "currency" else format_minor(value, row["currency"])
                for name, value in row.items()
            }
            for row in rows
        ]
    show(rows, as_json=arguments.json, title="open amounts")
    return 0


def _revenue(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        last = _day(arguments.last, "--to") or tools.clock.now().date()
        first = _day(arguments.first, "--from") or last.replace(day=1)
        if first > last:
            raise BadRequest(f"--from {first} is after --to {last}.", next_step="Swap the dates.")
        span = Range(first, last)
        if arguments.reporting:
            converter = Converter.load(session, arguments.reporting, first, last)
            found = [revenue.read_in(session, span, converter)]
        else:
            found = revenue.read(session, span)
    rows = [{name: getattr(each, name) for name in each.__slots__} for each in found]
    if not arguments.json:
        rows = [
            {name: _readable(name, value, row["currency"]) for name, value in row.items()}
            for row in rows
        ]
    show(rows, as_json=arguments.json, title=f"revenue, {first} to {last}")
    return 0


def _readable(name: str, value: Any, currency: str) -> str:
    if name == "currency":
        return currency
    return decimal_of(value) if name in revenue.UNITS else format_minor(value, currency)


def _day(written: str | None, option: str) -> date | None:
    try:
        return date.fromisoformat(written) if written else None
    except ValueError:
        raise BadRequest(f"{option} is {written!r}.", next_step="Write it as 2026-01-30.") from None


def _show(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        invoice = invoices.get(session, arguments.invoice)
        if arguments.html or arguments.pdf:
            _print(printing.invoice_page(session, invoice), arguments.html, arguments.pdf)
        elif arguments.json:
            show(invoice_json(session, invoice), as_json=True)
        else:
            _show_lines(invoice_json(session, invoice))
    return 0


def _credit_note(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        note = credit_notes.get(session, arguments.number)
        if arguments.html or arguments.pdf:
            _print(printing.credit_note_page(session, note), arguments.html, arguments.pdf)
            return 0
        shown = credit_note_json(note)
    if not arguments.json:
        for name in ("net", "tax", "total"):
            shown[name] = f"{shown[name]['text']} {shown[name]['currency']}"
    show(shown, as_json=arguments.json, title="credit note")
    return 0


def _show_lines(document: dict[str, Any]) -> None:
    lines = [
        {
            "description": line["description"],
            "quantity": line["quantity"],
            "unit": line["unit"],
            "unit price": line["unit_price"],
            "exact": line["exact"]["amount"],
            "billed": line["billed"]["text"],
        }
        for line in document["lines"]
    ]
    show(lines, as_json=False, title="lines")
    names = ("subtotal", "promotional_credit", "tax", "total", "prepaid", "due", "open")
    figures = {name: f"{document[name]['text']} {document['currency']}" for name in names}
    head = {name: document[name] for name in ("number", "status", "period_start", "period_end")}
    show({**head, **figures}, as_json=False, title=document["tenant"])


def _print(page: str, html: Path | None, pdf: Path | None) -> None:
    if html:
        html.write_text(page, encoding="utf-8")
    if pdf:
        pdf.write_bytes(printing.as_pdf(page))


def _pay(arguments: argparse.Namespace) -> int:
    units = units_of_amount(arguments.amount) if arguments.amount else None
    return _act(arguments, Kind.WIRE, f"manual:{arguments.reference}", units)


def _void(arguments: argparse.Namespace) -> int:
    return _act(arguments, Kind.VOID, new_id("void"), reason=arguments.reason)


def _write_off(arguments: argparse.Namespace) -> int:
    return _act(arguments, Kind.WRITE_OFF, new_id("write_off"))


def _act(
    arguments: argparse.Namespace,
    kind: Kind,
    reference: str,
    units: int | None = None,
    reason: str = "",
) -> int:
    asked = ActRequest(kind, arguments.invoice, reference, units, reason)
    with command_context() as tools:
        if submit(tools, asked).status == money_acts.WAITING:
            return 0
        return _summary(tools, arguments)


def _summary(tools: CommandContext, arguments: argparse.Namespace) -> int:
    with tools.database.read() as session:
        found = invoice_summary(invoices.get(session, arguments.invoice))
        show(found, as_json=arguments.json, title="invoice")
    return 0
