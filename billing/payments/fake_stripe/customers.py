"""Customers, their cards, and the Checkout page that saves a card."""

from typing import Any

from billing.payments.fake_stripe.objects import ApiError, Object, listing
from billing.payments.fake_stripe.state import StripeState

NO_ADDRESS = dict.fromkeys(("city", "country", "line1", "line2", "postal_code", "state"))


def create_customer(state: StripeState, form: dict[str, Any]) -> Object:
    made = state.make(
        "customer",
        name=form.get("name"),
        email=form.get("email"),
        metadata=form.get("metadata", {}),
        address=dict(NO_ADDRESS),
        currency="usd",
        invoice_prefix="FAKE",
        invoice_settings={
            "custom_fields": None,
            "default_payment_method": None,
            "footer": None,
            "rendering_options": None,
        },
        tax_exempt="none",
    )
    state.emit("customer.created", made)
    return made


def update_customer(state: StripeState, name: str, form: dict[str, Any]) -> Object:
    found = state.get("customer", name)
    found["metadata"] |= form.get("metadata", {})
    found["invoice_settings"] |= form.get("invoice_settings", {})
    for field in ("name", "email"):
        found[field] = form.get(field, found[field])
    state.emit("customer.updated", found)
    return found


def methods_of(state: StripeState, name: str) -> Object:
    state.get("customer", name)
    url = f"/v1/customers/{name}/payment_methods"
    return listing(url, state.all("payment_method", customer=name))


_SAVED = ("card", "sepa_debit", "us_bank_account")


def open_portal(state: StripeState, form: dict[str, Any], address: str) -> Object:
    customer = state.get("customer", form.get("customer", ""))
    return {
        "object": "billing_portal.session",
        "id": f"bps_{customer['id']}",
        "created": state.now,
        "customer": customer["id"],
        "livemode": False,
        "return_url": form.get("return_url"),
        "url": f"{address}/portal/{customer['id']}",
    }


def create_session(state: StripeState, form: dict[str, Any], address: str) -> Object:
    if form.get("mode") != "setup":
        raise ApiError(
            400, "The fake server supports Checkout sessions of mode `setup` only.", param="mode"
        )
    customer = state.get("customer", form.get("customer", ""))
    kinds = form.get("payment_method_types") or ["card"]
    if any(kind not in _SAVED for kind in kinds):
        raise ApiError(
            400,
            f"The payment method types {kinds} cannot be saved in mode `setup`.",
            param="payment_method_types",
        )
    intent = state.make(
        "setup_intent",
        customer=customer["id"],
        status="requires_payment_method",
        usage="off_session",
        payment_method_types=kinds,
        metadata=form.get("metadata", {}),
    )
    made = state.make(
        "checkout.session",
        customer=customer["id"],
        mode="setup",
        status="open",
        payment_status="no_payment_required",
        setup_intent=intent["id"],
        success_url=form.get("success_url"),
        cancel_url=form.get("cancel_url"),
        currency=form.get("currency"),
        metadata=form.get("metadata", {}),
        payment_method_types=kinds,
        expires_at=state.now + 86_400,
    )
    made["url"] = f"{address}/checkout/{made['id']}"
    return made


def leave_card(state: StripeState, customer: str, last4: str = "4242") -> Object:
    """Complete the customer's open Checkout sessions with a card."""
    return _complete(state, customer, attach_card(state, customer, last4))


def leave_debit(state: StripeState, customer: str, last4: str = "3000") -> Object:
    """The same with a SEPA direct debit."""
    made = _attach(
        state,
        customer,
        "sepa_debit",
        {"bank_code": "37040044", "branch_code": "", "country": "DE", "last4": last4},
    )
    return _complete(state, customer, made)


def _complete(state: StripeState, customer: str, method: Object) -> Object:
    for session in state.all("checkout.session", customer=customer, status="open"):
        intent = state.get("setup_intent", session["setup_intent"])
        intent |= {"status": "succeeded", "payment_method": method["id"]}
        session["status"] = "complete"
        state.emit("setup_intent.succeeded", intent)
        state.emit("checkout.session.completed", session)
    return method


def attach_card(state: StripeState, customer: str, last4: str) -> Object:
    card = {
        "brand": "visa",
        "country": "US",
        "display_brand": "visa",
        "exp_month": 8,
        "exp_year": 2030,
        "fingerprint": f"fake{last4}",
        "funding": "credit",
        "last4": last4,
        "networks": {"available": ["visa"], "preferred": None},
        "wallet": None,
    }
    return _attach(state, customer, "card", card)


def _attach(state: StripeState, customer: str, kind: str, details: Object) -> Object:
    owner = state.get("customer", customer)
    made = state.make(
        "payment_method",
        customer=owner["id"],
        type=kind,
        allow_redisplay="unspecified",
        billing_details={"address": dict(NO_ADDRESS), "email": None, "name": None, "phone": None},
        **{kind: details},
    )
    state.emit("payment_method.attached", made)
    return made


def default_card(state: StripeState, customer: str) -> Object | None:
    chosen = state.get("customer", customer)["invoice_settings"]["default_payment_method"]
    return state.get("payment_method", chosen) if chosen else None
