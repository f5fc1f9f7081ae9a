"""Payment intents, charges, refunds, disputes and meter events."""

from datetime import timedelta
from typing import Any

from billing.payments.fake_stripe.books import Books
from billing.payments.fake_stripe.customers import NO_ADDRESS, default_card
from billing.payments.fake_stripe.forms import whole, yes
from billing.payments.fake_stripe.shapes import ApiError, Object

REMEMBERED = timedelta(hours=24)  # period in which a meter event's identifier must be unique


def new_intent(
    books: Books, customer: str | None, amount: int, currency: str, metadata: dict[str, str]
) -> Object:
    return books.make(
        "payment_intent",
        amount=amount,
        currency=currency,
        customer=customer,
        metadata=metadata,
        status="requires_payment_method",
        capture_method="automatic",
        confirmation_method="automatic",
        payment_method_types=["card"],
        latest_charge=None,
        last_payment_error=None,
        next_action=None,
    )


def create_intent(books: Books, form: dict[str, Any]) -> Object:
    customer = form.get("customer")
    if whole(form, "amount") <= 0:
        raise ApiError(400, "Invalid positive integer", param="amount")
    made = new_intent(
        books, customer, whole(form, "amount"), form["currency"], form.get("metadata", {})
    )
    made["description"] = form.get("description")
    if not yes(form, "confirm"):
        return made
    chosen = form.get("payment_method")
    card = books.get("payment_method", chosen) if chosen else None
    if card is None and customer:
        card = default_card(books, customer)
    problem = attempt(books, made, card)
    if problem is not None:
        status = 400 if card is None else 402
        raise ApiError(
            status, problem[1], code=problem[0], decline_code="generic_decline", payment_intent=made
        )
    return made


def attempt(books: Books, intent: Object, card: Object | None) -> tuple[str, str] | None:
    """Charge the card; returns (code, message) if it is declined."""
    problem = books.decline_of(card)
    charge = books.make(
        "charge",
        amount=intent["amount"],
        currency=intent["currency"],
        customer=intent["customer"],
        payment_intent=intent["id"],
        payment_method=card["id"] if card else None,
        paid=problem is None,
        captured=problem is None,
        amount_captured=0 if problem else intent["amount"],
        status="failed" if problem else "succeeded",
        failure_code=problem[0] if problem else None,
        failure_message=problem[1] if problem else None,
        billing_details={"address": dict(NO_ADDRESS), "email": None, "name": None, "phone": None},
        refunds={"object": "list", "data": [], "has_more": False, "url": "/v1/refunds"},
    )
    intent["latest_charge"] = charge["id"]
    if problem is not None:
        error = {"type": "card_error", "code": problem[0], "message": problem[1]}
        intent |= {"status": "requires_payment_method", "last_payment_error": error}
        books.tell("charge.failed", charge)
        books.tell("payment_intent.payment_failed", intent)
        return problem
    intent |= {
        "status": "succeeded",
        "amount_received": intent["amount"],
        "payment_method": card["id"] if card else None,
        "last_payment_error": None,
    }
    books.tell("charge.succeeded", charge)
    books.tell("payment_intent.succeeded", intent)
    return None


def create_refund(books: Books, form: dict[str, Any]) -> Object:
    intent = books.get("payment_intent", form.get("payment_intent", ""))
    charge = books.get("charge", intent["latest_charge"] or "")
    left = charge["amount_captured"] - charge["amount_refunded"]
    amount = whole(form, "amount") or left
    if amount > left:
        raise ApiError(
            400,
            f"Refund amount ({amount}) is greater than unrefunded amount on charge ({left})",
            param="amount",
            code="charge_already_refunded" if left == 0 else "amount_too_large",
        )
    charge["amount_refunded"] += amount
    charge["refunded"] = charge["amount_refunded"] == charge["amount_captured"]
    made = books.make(
        "refund",
        amount=amount,
        currency=charge["currency"],
        charge=charge["id"],
        payment_intent=intent["id"],
        metadata=form.get("metadata", {}),
        status="succeeded",
        reason=form.get("reason"),
        destination_details={"card": {"type": "refund"}, "type": "card"},
    )
    books.tell("refund.created", made)
    books.tell("charge.refunded", charge)
    return made


def fail_refund(books: Books, name: str) -> Object:
    """Fail a refund: the bank returns the money."""
    made = books.get("refund", name)
    made |= {"status": "failed", "failure_reason": "lost_or_stolen_card"}
    charge = books.get("charge", made["charge"])
    charge["amount_refunded"] -= made["amount"]
    books.tell("refund.failed", made)
    return made


def open_dispute(books: Books, intent_name: str, amount: int | None = None) -> Object:
    """Open a dispute: the bank withdraws the money until it is decided."""
    intent = books.get("payment_intent", intent_name)
    charge = books.get("charge", intent["latest_charge"])
    charge["disputed"] = True
    made = books.make(
        "dispute",
        amount=amount or charge["amount"],
        currency=charge["currency"],
        charge=charge["id"],
        payment_intent=intent_name,
        reason="fraudulent",
        status="needs_response",
        evidence={},
        evidence_details={"due_by": books.now + 7 * 86_400, "has_evidence": False},
    )
    books.tell("charge.dispute.created", made)
    books.tell("charge.dispute.funds_withdrawn", made)
    return made


def close_dispute(books: Books, name: str, status: str) -> Object:
    """`status` is won or lost."""
    made = books.get("dispute", name)
    made["status"] = status
    if status == "won":
        books.tell("charge.dispute.funds_reinstated", made)
    books.tell("charge.dispute.closed", made)
    return made


def meter_event(books: Books, form: dict[str, Any]) -> Object:
    identifier, now = form.get("identifier") or f"auto-{len(books.identifiers)}", books.clock.now()
    seen = books.identifiers.get(identifier)
    if seen is not None and now - seen < REMEMBERED:
        raise ApiError(
            400,
            f"An event already exists with identifier {identifier}.",
            code="duplicate_meter_event",
        )
    at = whole(form, "timestamp") or books.now
    if not books.now - 35 * 86_400 <= at <= books.now + 300:
        raise ApiError(400, "The timestamp must lie in the last 35 days.", param="timestamp")
    if not str(form["payload"]["value"]).isdigit():
        raise ApiError(400, "The value must be a whole number.", param="payload[value]")
    books.identifiers[identifier] = now
    made = books.maker.make(
        "billing.meter_event",
        books.now,
        event_name=form["event_name"],
        identifier=identifier,
        payload=form["payload"],
        timestamp=at,
    )
    books.objects.setdefault("meter_event", {})[f"{identifier}@{now.timestamp()}"] = made
    return made
