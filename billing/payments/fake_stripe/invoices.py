"""Invoices (draft, open, then paid, void or uncollectible) and credit notes."""

from typing import Any

from billing.payments.fake_stripe import payments
from billing.payments.fake_stripe.customers import default_card
from billing.payments.fake_stripe.forms import integer, is_true
from billing.payments.fake_stripe.objects import ApiError, Object, listing
from billing.payments.fake_stripe.state import StripeState

MOST_LINES = 250


def create(state: StripeState, form: dict[str, Any]) -> Object:
    customer = state.get("customer", form.get("customer", ""))
    way = form.get("collection_method", "charge_automatically")
    settings: dict[str, Any] | None = None
    if "payment_settings" in form:
        settings = {"default_mandate": None, "payment_method_options": None}
        settings |= form["payment_settings"]
        kinds = settings.get("payment_method_types") or []
        if "customer_balance" in kinds and way != "send_invoice":
            raise ApiError(400, "customer_balance needs collection_method=send_invoice.")
    if way == "send_invoice" and not integer(form, "days_until_due"):
        raise ApiError(400, "send_invoice needs days_until_due.", param="days_until_due")
    made = state.make(
        "invoice",
        customer=customer["id"],
        customer_name=customer["name"],
        customer_email=customer["email"],
        currency=form.get("currency", "usd"),
        collection_method=way,
        payment_settings=settings,
        auto_advance=is_true(form, "auto_advance"),
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
        period_start=state.now,
        period_end=state.now,
    )
    made["lines"] = listing(f"/v1/invoices/{made['id']}/lines", [])
    state.emit("invoice.created", made)
    return _counted(made)


def add_lines(state: StripeState, name: str, form: dict[str, Any]) -> Object:
    invoice = _only(state, name, "draft")
    lines = form.get("lines", [])
    if len(invoice["lines"]["data"]) + len(lines) > MOST_LINES:
        raise ApiError(400, f"An invoice can have at most {MOST_LINES} lines.", param="lines")
    for line in lines:
        amount = int(line["amount"])
        made = state.make(
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


def lines_of(state: StripeState, name: str, query: dict[str, Any]) -> Object:
    every = state.get("invoice", name)["lines"]["data"]
    names = [line["id"] for line in every]
    start = names.index(query["starting_after"]) + 1 if "starting_after" in query else 0
    size = int(query.get("limit") or 10)
    more = len(every) > start + size
    return listing(f"/v1/invoices/{name}/lines", every[start : start + size], has_more=more)


def finalise(state: StripeState, name: str, form: dict[str, Any]) -> Object:
    invoice = _only(state, name, "draft")
    invoice["status"] = "open"
    if "auto_advance" in form:
        invoice["auto_advance"] = is_true(form, "auto_advance")
    invoice["number"] = invoice["number"] or f"FAKE-{name[-4:]}"
    invoice["hosted_invoice_url"] = f"https://invoice.stripe.invalid/i/{name}"
    invoice["invoice_pdf"] = f"https://invoice.stripe.invalid/i/{name}/pdf"
    invoice["status_transitions"]["finalized_at"] = state.now
    invoice["effective_at"] = state.now
    _counted(invoice)
    state.emit("invoice.finalized", invoice)
    if invoice["amount_remaining"] <= 0:
        _settle(state, invoice)
    else:
        _intent(state, invoice)
    return invoice


def pay(state: StripeState, name: str, form: dict[str, Any]) -> Object:
    invoice = state.get("invoice", name)
    if invoice["status"] == "paid":
        raise ApiError(400, "Invoice is already paid", code="invoice_already_paid")
    if invoice["status"] != "open":
        raise ApiError(400, f"An invoice that is {invoice['status']} cannot be paid.")
    if is_true(form, "paid_out_of_band"):
        for each in state.all("invoice_payment", invoice=name, status="open"):
            each["status"] = "canceled"
        invoice["amount_remaining"] = 0
        _settle(state, invoice)
        return invoice
    payment = state.all("invoice_payment", invoice=name, status="open")[0]
    intent = state.get("payment_intent", payment["payment"]["payment_intent"])
    if intent["status"] == "processing":
        raise ApiError(400, "The payment intent of the invoice is processing.")
    card = default_card(state, invoice["customer"])
    invoice["attempted"] = True
    invoice["attempt_count"] += 1
    if card is None:
        raise ApiError(400, "This customer has no default payment method.", code="missing")
    problem = payments.attempt(state, intent, card)
    if problem is not None:
        state.emit("invoice.payment_failed", invoice)
        raise ApiError(402, problem[1], code=problem[0], decline_code="generic_decline")
    if intent["status"] == "processing":
        return invoice
    paid_by(state, invoice, payment, intent)
    return invoice


def paid_by(state: StripeState, invoice: Object, payment: Object, intent: Object) -> None:
    """The intent has succeeded: the invoice is paid."""
    payment |= {"status": "paid", "amount_paid": intent["amount"]}
    payment["status_transitions"] = {"canceled_at": None, "paid_at": state.now}
    invoice["amount_paid"] += intent["amount"]
    invoice["amount_remaining"] = 0
    state.emit("invoice_payment.paid", payment)
    _settle(state, invoice)


def close(state: StripeState, name: str, status: str) -> Object:
    invoice = _only(state, name, "open", "uncollectible")
    invoice["status"] = status
    if status == "void":
        invoice["amount_remaining"] = 0
        for each in state.all("invoice_payment", invoice=name, status="open"):
            each["status"] = "canceled"
    moment = "voided_at" if status == "void" else "marked_uncollectible_at"
    invoice["status_transitions"][moment] = state.now
    state.emit("invoice.voided" if status == "void" else "invoice.marked_uncollectible", invoice)
    return invoice


def create_credit_note(state: StripeState, form: dict[str, Any]) -> Object:
    invoice = _only(state, form.get("invoice", ""), "open", "paid")
    amount = integer(form, "amount") or sum(
        int(each["unit_amount"]) * int(each.get("quantity", 1)) for each in form["lines"]
    )
    if invoice["status"] == "open" and amount > invoice["amount_remaining"]:
        raise ApiError(400, "The credit note exceeds the amount remaining.", param="amount")
    made = state.make(
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
        for each in state.all("invoice_payment", invoice=invoice["id"], status="open"):
            each["amount_requested"] = invoice["amount_remaining"]
            intent = state.get("payment_intent", each["payment"]["payment_intent"])
            intent["amount"] = invoice["amount_remaining"]
        if invoice["amount_remaining"] == 0:
            _settle(state, invoice)
    state.emit("credit_note.created", made)
    return made


def expanded(state: StripeState, invoice: Object, query: dict[str, Any]) -> Object:
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
        shown["payments"] = listing(url, state.all("invoice_payment", invoice=invoice["id"]))
    return shown


def _intent(state: StripeState, invoice: Object) -> None:
    intent = payments.new_intent(
        state, invoice["customer"], invoice["amount_remaining"], invoice["currency"], {}
    )
    state.make(
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


def _settle(state: StripeState, invoice: Object) -> None:
    invoice |= {"status": "paid", "next_payment_attempt": None}
    invoice["status_transitions"]["paid_at"] = state.now
    state.emit("invoice.paid", invoice)


def _counted(invoice: Object) -> Object:
    total = sum(line["amount"] for line in invoice["lines"]["data"])
    for name in ("subtotal", "subtotal_excluding_tax", "total", "total_excluding_tax"):
        invoice[name] = total
    invoice["amount_due"] = invoice["amount_remaining"] = max(0, total)
    return invoice


def _only(state: StripeState, name: str, *states: str) -> Object:
    invoice = state.get("invoice", name)
    if invoice["status"] not in states:
        raise ApiError(
            400, f"The invoice is {invoice['status']}, not {' or '.join(states)}.", param="invoice"
        )
    return invoice
