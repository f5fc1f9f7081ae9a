"""Invoices (draft, open, then paid, void or uncollectible) and credit notes."""

from typing import Any

from billing.payments.fake_stripe import money
from billing.payments.fake_stripe.books import Books
from billing.payments.fake_stripe.customers import default_card
from billing.payments.fake_stripe.forms import whole, yes
from billing.payments.fake_stripe.shapes import ApiError, Object, listing

MOST_LINES = 250


def create(books: Books, form: dict[str, Any]) -> Object:
    customer = books.get("customer", form.get("customer", ""))
    made = books.make(
        "invoice",
        customer=customer["id"],
        customer_name=customer["name"],
        customer_email=customer["email"],
        currency=form.get("currency", "usd"),
        collection_method=form.get("collection_method", "charge_automatically"),
        auto_advance=yes(form, "auto_advance"),
        description=form.get("description"),
        number=form.get("number"),
        metadata=form.get("metadata", {}),
        billing_reason="manual",
        status="draft",
        account_country="US",
        customer_tax_exempt="none",
        issuer={"type": "self"},
        automatic_tax={
            "enabled": False,
            "liability": None,
            "status": None,
            "disabled_reason": None,
            "provider": None,
        },
        status_transitions=dict.fromkeys(
            ("finalized_at", "marked_uncollectible_at", "paid_at", "voided_at")
        ),
        next_payment_attempt=None,
        due_date=None,
        effective_at=None,
        period_start=books.now,
        period_end=books.now,
    )
    made["lines"] = listing(f"/v1/invoices/{made['id']}/lines", [])
    books.tell("invoice.created", made)
    return _counted(made)


def add_lines(books: Books, name: str, form: dict[str, Any]) -> Object:
    invoice = _only(books, name, "draft")
    lines = form.get("lines", [])
    if len(invoice["lines"]["data"]) + len(lines) > MOST_LINES:
        raise ApiError(400, f"An invoice can have at most {MOST_LINES} lines.", param="lines")
    for line in lines:
        amount = int(line["amount"])
        made = books.make(
            "line_item",
            amount=amount,
            subtotal=amount,
            currency=invoice["currency"],
            description=line.get("description"),
            invoice=name,
            metadata=line.get("metadata", {}),
            quantity=1,
            period={key: int(value) for key, value in line.get("period", {}).items()},
            discountable=False,
        )
        invoice["lines"]["data"].append(made)
    return _counted(invoice)


def lines_of(books: Books, name: str, query: dict[str, Any]) -> Object:
    every = books.get("invoice", name)["lines"]["data"]
    names = [line["id"] for line in every]
    start = names.index(query["starting_after"]) + 1 if "starting_after" in query else 0
    size = int(query.get("limit") or 10)
    more = len(every) > start + size
    return listing(f"/v1/invoices/{name}/lines", every[start : start + size], has_more=more)


def finalise(books: Books, name: str, form: dict[str, Any]) -> Object:
    invoice = _only(books, name, "draft")
    invoice["status"] = "open"
    if "auto_advance" in form:
        invoice["auto_advance"] = yes(form, "auto_advance")
    invoice["number"] = invoice["number"] or f"FAKE-{name[-4:]}"
    invoice["hosted_invoice_url"] = f"https://invoice.stripe.invalid/i/{name}"
    invoice["invoice_pdf"] = f"https://invoice.stripe.invalid/i/{name}/pdf"
    invoice["status_transitions"]["finalized_at"] = books.now
    invoice["effective_at"] = books.now
    _counted(invoice)
    books.tell("invoice.finalized", invoice)
    if invoice["amount_remaining"] <= 0:
        _settle(books, invoice)
    else:
        _intent(books, invoice)
    return invoice


def pay(books: Books, name: str, form: dict[str, Any]) -> Object:
    invoice = books.get("invoice", name)
    if invoice["status"] == "paid":
        raise ApiError(400, "Invoice is already paid", code="invoice_already_paid")
    if invoice["status"] != "open":
        raise ApiError(400, f"An invoice that is {invoice['status']} cannot be paid.")
    if yes(form, "paid_out_of_band"):
        for each in books.all("invoice_payment", invoice=name, status="open"):
            each["status"] = "canceled"
        invoice["amount_remaining"] = 0
        _settle(books, invoice)
        return invoice
    payment = books.all("invoice_payment", invoice=name, status="open")[0]
    intent = books.get("payment_intent", payment["payment"]["payment_intent"])
    card = default_card(books, invoice["customer"])
    invoice["attempted"] = True
    invoice["attempt_count"] += 1
    if card is None:
        raise ApiError(400, "This customer has no default payment method.", code="missing")
    problem = money.attempt(books, intent, card)
    if problem is not None:
        books.tell("invoice.payment_failed", invoice)
        raise ApiError(402, problem[1], code=problem[0], decline_code="generic_decline")
    payment |= {"status": "paid", "amount_paid": intent["amount"]}
    payment["status_transitions"] = {"canceled_at": None, "paid_at": books.now}
    invoice["amount_paid"] += intent["amount"]
    invoice["amount_remaining"] = 0
    books.tell("invoice_payment.paid", payment)
    _settle(books, invoice)
    return invoice


def close(books: Books, name: str, status: str) -> Object:
    invoice = _only(books, name, "open", "uncollectible")
    invoice["status"] = status
    if status == "void":
        invoice["amount_remaining"] = 0
        for each in books.all("invoice_payment", invoice=name, status="open"):
            each["status"] = "canceled"
    moment = "voided_at" if status == "void" else "marked_uncollectible_at"
    invoice["status_transitions"][moment] = books.now
    books.tell("invoice.voided" if status == "void" else "invoice.marked_uncollectible", invoice)
    return invoice


def create_credit_note(books: Books, form: dict[str, Any]) -> Object:
    invoice = _only(books, form.get("invoice", ""), "open", "paid")
    amount = whole(form, "amount") or sum(int(each["unit_amount"]) for each in form["lines"])
    if invoice["status"] == "open" and amount > invoice["amount_remaining"]:
        raise ApiError(400, "The credit note exceeds the amount remaining.", param="amount")
    made = books.make(
        "credit_note",
        invoice=invoice["id"],
        customer=invoice["customer"],
        currency=invoice["currency"],
        amount=amount,
        subtotal=amount,
        total=amount,
        memo=form.get("memo"),
        metadata=form.get("metadata", {}),
        number=f"{invoice['number']}-CN",
        status="issued",
        type="pre_payment" if invoice["status"] == "open" else "post_payment",
    )
    made["lines"] = listing(f"/v1/credit_notes/{made['id']}/lines", [])
    if invoice["status"] == "open":
        invoice["pre_payment_credit_notes_amount"] += amount
        invoice["amount_remaining"] -= amount
        for each in books.all("invoice_payment", invoice=invoice["id"], status="open"):
            each["amount_requested"] = invoice["amount_remaining"]
            intent = books.get("payment_intent", each["payment"]["payment_intent"])
            intent["amount"] = invoice["amount_remaining"]
        if invoice["amount_remaining"] == 0:
            _settle(books, invoice)
    books.tell("credit_note.created", made)
    return made


def expanded(books: Books, invoice: Object, query: dict[str, Any]) -> Object:
    """The invoice; `payments` only with `expand[]=payments`, as at Stripe."""
    wanted = {name.removeprefix("data.") for name in query.get("expand", [])}
    shown = dict(invoice)
    first = invoice["lines"]["data"][:10]
    shown["lines"] = invoice["lines"] | {
        "data": first,
        "has_more": len(first) < len(invoice["lines"]["data"]),
    }
    if "payments" in wanted:
        url = f"/v1/invoice_payments?invoice={invoice['id']}"
        shown["payments"] = listing(url, books.all("invoice_payment", invoice=invoice["id"]))
    return shown


def _intent(books: Books, invoice: Object) -> None:
    intent = money.new_intent(
        books, invoice["customer"], invoice["amount_remaining"], invoice["currency"], {}
    )
    books.make(
        "invoice_payment",
        invoice=invoice["id"],
        amount_requested=invoice["amount_remaining"],
        amount_paid=None,
        currency=invoice["currency"],
        is_default=True,
        payment={"type": "payment_intent", "payment_intent": intent["id"]},
        status="open",
        status_transitions={"canceled_at": None, "paid_at": None},
    )


def _settle(books: Books, invoice: Object) -> None:
    invoice |= {"status": "paid", "next_payment_attempt": None}
    invoice["status_transitions"]["paid_at"] = books.now
    books.tell("invoice.paid", invoice)


def _counted(invoice: Object) -> Object:
    total = sum(line["amount"] for line in invoice["lines"]["data"])
    for name in ("subtotal", "subtotal_excluding_tax", "total", "total_excluding_tax"):
        invoice[name] = total
    invoice["amount_due"] = invoice["amount_remaining"] = max(0, total)
    return invoice


def _only(books: Books, name: str, *states: str) -> Object:
    invoice = books.get("invoice", name)
    if invoice["status"] not in states:
        raise ApiError(
            400, f"The invoice is {invoice['status']}, not {' or '.join(states)}.", param="invoice"
        )
    return invoice
