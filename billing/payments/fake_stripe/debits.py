"""Payment methods whose banks answer days later: direct debits, and transfers to virtual accounts."""

from typing import Any

from billing.payments.fake_stripe.invoices import paid_by
from billing.payments.fake_stripe.objects import ApiError, Object
from billing.payments.fake_stripe.state import StripeState

_EURO_COUNTRIES = ("DE", "FR", "IE", "NL")


def answer(state: StripeState, intent_name: str, failure: str = "") -> Object:
    """The bank answers a debit that is processing; with `failure` it returns it, also if it had
    succeeded in Stripe's eyes for an instant."""
    intent = state.get("payment_intent", intent_name)
    if intent["status"] != "processing":
        raise ApiError(400, f"The payment intent is {intent['status']}, not processing.")
    charge = state.get("charge", intent["latest_charge"])
    payment = next(
        (
            each
            for each in state.all("invoice_payment")
            if each["payment"]["payment_intent"] == intent_name
        ),
        None,
    )
    if failure:
        error = {"type": "card_error", "code": "payment_method_unactivated", "message": failure}
        intent |= {"status": "requires_payment_method", "last_payment_error": error}
        charge |= {"status": "failed", "failure_message": failure}
        state.emit("charge.failed", charge)
        state.emit("payment_intent.payment_failed", intent)
        if payment is not None:
            state.emit("invoice.payment_failed", state.get("invoice", payment["invoice"]))
        return intent
    intent |= {"status": "succeeded", "amount_received": intent["amount"]}
    charge |= {"status": "succeeded", "paid": True, "captured": True}
    charge["amount_captured"] = intent["amount"]
    state.emit("charge.succeeded", charge)
    state.emit("payment_intent.succeeded", intent)
    if payment is not None:
        paid_by(state, state.get("invoice", payment["invoice"]), payment, intent)
    return intent


def receive(state: StripeState, customer: str, amount: int) -> int:
    """A transfer reaches the customer's virtual account; it pays open invoices that take transfers, the
    first one first, each as a whole. Returns what stays in the cash balance."""
    balance = state.cash.get(customer, 0) + amount
    state.emit("cash_balance.funds_available", {"object": "cash_balance", "customer": customer})
    for invoice in reversed(state.all("invoice", customer=customer, status="open")):
        takes = (invoice["payment_settings"] or {}).get("payment_method_types") or ()
        if "customer_balance" not in takes or invoice["amount_remaining"] > balance:
            continue
        payment = state.all("invoice_payment", invoice=invoice["id"], status="open")[0]
        intent = state.get("payment_intent", payment["payment"]["payment_intent"])
        balance -= intent["amount"]
        charge = state.make(
            "charge",
            amount=intent["amount"],
            amount_captured=intent["amount"],
            currency=intent["currency"],
            customer=customer,
            payment_intent=intent["id"],
            paid=True,
            captured=True,
            status="succeeded",
            refunds={"object": "list", "data": [], "has_more": False, "url": "/v1/refunds"},
        )
        intent |= {
            "status": "succeeded",
            "amount_received": intent["amount"],
            "latest_charge": charge["id"],
        }
        state.emit("payment_intent.succeeded", intent)
        paid_by(state, invoice, payment, intent)
    state.cash[customer] = balance
    return balance


def instructions(state: StripeState, customer: str, form: dict[str, Any]) -> Object:
    """The virtual account of a customer, the same at every call."""
    found, terms = state.get("customer", customer), form.get("bank_transfer", {})
    if form.get("funding_type") != "bank_transfer" or "type" not in terms:
        raise ApiError(400, "Only bank transfers are supported.", param="funding_type")
    kind = str(terms["type"])
    if kind == "eu_bank_transfer":
        country = terms.get(kind, {}).get("country")
        if country not in _EURO_COUNTRIES:
            raise ApiError(400, f"The country {country} is not supported.", param="country")
        number = f"{country}00FAKE{found['id'][-10:]}"
        address: Object = {
            "type": "iban",
            "iban": {"account_holder_name": "Fake Stripe", "bic": "FAKEDEFF", "iban": number},
        }
    else:
        number = found["id"][-10:]
        address = {"type": "aba", "aba": {"account_number": number, "routing_number": "110000000"}}
    return {
        "object": "funding_instructions",
        "bank_transfer": {"type": kind, "country": "US", "financial_addresses": [address]},
        "currency": form.get("currency"),
        "funding_type": "bank_transfer",
        "livemode": False,
    }
