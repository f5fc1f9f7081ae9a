"""Customers, their cards, and the Checkout page that saves a card."""

from typing import Any

from billing.payments.fake_stripe.books import Books
from billing.payments.fake_stripe.shapes import ApiError, Object, listing

NO_ADDRESS = dict.fromkeys(("city", "country", "line1", "line2", "postal_code", "state"))


def create_customer(books: Books, form: dict[str, Any]) -> Object:
    made = books.make(
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
    books.tell("customer.created", made)
    return made


def update_customer(books: Books, name: str, form: dict[str, Any]) -> Object:
    found = books.get("customer", name)
    found["metadata"] |= form.get("metadata", {})
    found["invoice_settings"] |= form.get("invoice_settings", {})
    for field in ("name", "email"):
        found[field] = form.get(field, found[field])
    books.tell("customer.updated", found)
    return found


def methods_of(books: Books, name: str) -> Object:
    books.get("customer", name)
    url = f"/v1/customers/{name}/payment_methods"
    return listing(url, books.all("payment_method", customer=name))


def create_session(books: Books, form: dict[str, Any], address: str) -> Object:
    if form.get("mode") != "setup":
        raise ApiError(
            400, "The fake server supports Checkout sessions of mode `setup` only.", param="mode"
        )
    customer = books.get("customer", form.get("customer", ""))
    intent = books.make(
        "setup_intent",
        customer=customer["id"],
        status="requires_payment_method",
        usage="off_session",
        payment_method_types=["card"],
        metadata=form.get("metadata", {}),
    )
    made = books.make(
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
        payment_method_types=["card"],
        expires_at=books.now + 86_400,
    )
    made["url"] = f"{address}/checkout/{made['id']}"
    return made


def leave_card(books: Books, customer: str, last4: str = "4242") -> Object:
    """Complete the customer's open Checkout sessions with a card."""
    method = attach_card(books, customer, last4)
    for session in books.all("checkout.session", customer=customer, status="open"):
        intent = books.get("setup_intent", session["setup_intent"])
        intent |= {"status": "succeeded", "payment_method": method["id"]}
        session["status"] = "complete"
        books.tell("setup_intent.succeeded", intent)
        books.tell("checkout.session.completed", session)
    return method


def attach_card(books: Books, customer: str, last4: str) -> Object:
    owner = books.get("customer", customer)
    made = books.make(
        "payment_method",
        customer=owner["id"],
        type="card",
        allow_redisplay="unspecified",
        billing_details={"address": dict(NO_ADDRESS), "email": None, "name": None, "phone": None},
        card={
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
        },
    )
    books.tell("payment_method.attached", made)
    return made


def default_card(books: Books, customer: str) -> Object | None:
    chosen = books.get("customer", customer)["invoice_settings"]["default_payment_method"]
    return books.get("payment_method", chosen) if chosen else None
