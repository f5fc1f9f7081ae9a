"""Payment intents, charges, refunds, disputes and meter events."""

from datetime import timedelta
from typing import Any

from billing.payments.fake_stripe.customers import NO_ADDRESS, default_card
from billing.payments.fake_stripe.forms import integer, is_true
from billing.payments.fake_stripe.objects import ApiError, Object
from billing.payments.fake_stripe.state import StripeState

DELAYED = ("sepa_debit", "us_bank_account")  # succeed or fail days later
REMEMBERED = timedelta(hours=24)  # period in which a meter event's identifier must be unique


def new_intent(
    state: StripeState, customer: str | None, amount: int, currency: str, metadata: dict[str, str]
) -> Object:
    return state.make(
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


def create_intent(state: StripeState, form: dict[str, Any]) -> Object:
    customer = form.get("customer")
    if integer(form, "amount") <= 0:
        raise ApiError(400, "Invalid positive integer", param="amount")
    made = new_intent(
        state, customer, integer(form, "amount"), form["currency"], form.get("metadata", {})
    )
    made["description"] = form.get("description")
    if not is_true(form, "confirm"):
        return made
    chosen = form.get("payment_method")
    card = state.get("payment_method", chosen) if chosen else None
    if card is None and customer:
        card = default_card(state, customer)
    problem = attempt(state, made, card)
    if problem is not None:
        status = 400 if card is None else 402
        raise ApiError(
            status, problem[1], code=problem[0], decline_code="generic_decline", payment_intent=made
        )
    return made


def attempt(state: StripeState, intent: Object, card: Object | None) -> tuple[str, str] | None:
    """Charge the card; returns (code, message) if it is declined."""
    problem, waits = state.decline_of(card), card is not None and card["type"] in DELAYED
    charge = state.make(
        "charge",
        amount=intent["amount"],
        currency=intent["currency"],
        customer=intent["customer"],
        payment_intent=intent["id"],
        payment_method=card["id"] if card else None,
        paid=problem is None and not waits,
        captured=problem is None and not waits,
        amount_captured=0 if problem or waits else intent["amount"],
        status="failed" if problem else "pending" if waits else "succeeded",
        failure_code=problem[0] if problem else None,
        failure_message=problem[1] if problem else None,
        billing_details={"address": dict(NO_ADDRESS), "email": None, "name": None, "phone": None},
        refunds={"object": "list", "data": [], "has_more": False, "url": "/v1/refunds"},
    )
    intent["latest_charge"] = charge["id"]
    if problem is not None:
        error = {"type": "card_error", "code": problem[0], "message": problem[1]}
        intent |= {"status": "requires_payment_method", "last_payment_error": error}
        state.emit("charge.failed", charge)
        state.emit("payment_intent.payment_failed", intent)
        return problem
    if waits and card is not None:
        intent |= {
            "status": "processing",
            "payment_method": card["id"],
            "last_payment_error": None,
        }
        state.emit("charge.pending", charge)
        state.emit("payment_intent.processing", intent)
        return None
    intent |= {
        "status": "succeeded",
        "amount_received": intent["amount"],
        "payment_method": card["id"] if card else None,
        "last_payment_error": None,
    }
    state.emit("charge.succeeded", charge)
    state.emit("payment_intent.succeeded", intent)
    return None


def create_refund(state: StripeState, form: dict[str, Any]) -> Object:
    intent = state.get("payment_intent", form.get("payment_intent", ""))
    charge = state.get("charge", intent["latest_charge"] or "")
    left = charge["amount_captured"] - charge["amount_refunded"]
    amount = integer(form, "amount") or left
    if amount > left:
        raise ApiError(
            400,
            f"Refund amount ({amount}) is greater than unrefunded amount on charge ({left})",
            param="amount",
            code="charge_already_refunded" if left == 0 else "amount_too_large",
        )
    charge["amount_refunded"] += amount
    charge["refunded"] = charge["amount_refunded"] == charge["amount_captured"]
    made = state.make(
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
    state.emit("refund.created", made)
    state.emit("charge.refunded", charge)
    return made


def fail_refund(state: StripeState, name: str) -> Object:
    """Fail a refund: the bank returns the money."""
    made = state.get("refund", name)
    made |= {"status": "failed", "failure_reason": "lost_or_stolen_card"}
    charge = state.get("charge", made["charge"])
    charge["amount_refunded"] -= made["amount"]
    state.emit("refund.failed", made)
    return made


def open_dispute(state: StripeState, intent_name: str, amount: int | None = None) -> Object:
    """Open a dispute: the bank withdraws the money until it is decided."""
    intent = state.get("payment_intent", intent_name)
    charge = state.get("charge", intent["latest_charge"])
    charge["disputed"] = True
    made = state.make(
        "dispute",
        amount=amount or charge["amount"],
        currency=charge["currency"],
        charge=charge["id"],
        payment_intent=intent_name,
        reason="fraudulent",
        status="needs_response",
        evidence={},
        evidence_details={"due_by": state.now + 7 * 86_400, "has_evidence": False},
    )
    state.emit("charge.dispute.created", made)
    state.emit("charge.dispute.funds_withdrawn", made)
    return made


def close_dispute(state: StripeState, name: str, status: str) -> Object:
    """`status` is won or lost."""
    made = state.get("dispute", name)
    made["status"] = status
    if status == "won":
        state.emit("charge.dispute.funds_reinstated", made)
    state.emit("charge.dispute.closed", made)
    return made


def meter_event(state: StripeState, form: dict[str, Any]) -> Object:
    identifier, now = form.get("identifier") or f"auto-{len(state.identifiers)}", state.clock.now()
    seen = state.identifiers.get(identifier)
    if seen is not None and now - seen < REMEMBERED:
        raise ApiError(
            400,
            f"An event already exists with identifier {identifier}.",
            code="duplicate_meter_event",
        )
    at = integer(form, "timestamp") or state.now
    if not state.now - 35 * 86_400 <= at <= state.now + 300:
        raise ApiError(400, "The timestamp must lie in the last 35 days.", param="timestamp")
    if not str(form["payload"]["value"]).isdigit():
        raise ApiError(400, "The value must be a whole number.", param="payload[value]")
    state.identifiers[identifier] = now
    made = state.maker.make(
        "billing.meter_event",
        state.now,
        event_name=form["event_name"],
        identifier=identifier,
        payload=form["payload"],
        timestamp=at,
    )
    state.objects.setdefault("meter_event", {})[f"{identifier}@{now.timestamp()}"] = made
    return made
