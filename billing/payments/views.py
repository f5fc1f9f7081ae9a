"""Payments, methods, commands and events as JSON, for routes and commands."""

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.amounts import minor
from billing.payments.tables import (
    DunningCase,
    Payment,
    PaymentCommand,
    PaymentCustomer,
    PaymentMethod,
    PaymentWebhook,
    Refund,
)


def describe_payment(session: Session, each: Payment) -> dict[str, Any]:
    refunds = session.scalars(
        select(Refund).where(Refund.payment_id == each.id).order_by(Refund.created_at)
    )
    return {
        "id": each.id,
        "tenant_id": each.tenant_id,
        "invoice_id": each.invoice_id,
        "provider": each.provider,
        "external_id": each.external_id,
        "amount": minor(each.amount_minor, each.currency),
        "refunded": minor(each.refunded_minor, each.currency),
        "status": each.status,
        "failure": each.failure,
        "created_at": each.created_at.isoformat(),
        "refunds": [describe_refund(made) for made in refunds],
    }


def describe_refund(made: Refund) -> dict[str, Any]:
    return {
        "id": made.id,
        "payment_id": made.payment_id,
        "amount": minor(made.amount_minor, made.currency),
        "status": made.status,
        "reason": made.reason,
        "created_at": made.created_at.isoformat(),
    }


def describe_method(session: Session, each: PaymentMethod) -> dict[str, Any]:
    customer = session.get(PaymentCustomer, (each.tenant_id, each.provider))
    return {
        "id": each.id,
        "label": each.label,
        "default": customer is not None and customer.default_method == each.external_id,
        "created_at": each.created_at.isoformat(),
    }


def describe_command(each: PaymentCommand) -> dict[str, Any]:
    state = "done" if each.done_at else "refused" if each.failed else "waiting"
    return {
        "key": each.idempotency_key,
        "tenant_id": each.tenant_id,
        "state": state,
        "attempts": each.attempts,
        "next_at": None if each.done_at else each.next_at.isoformat(),
        "last_error": each.last_error,
    }


def describe_event(each: PaymentWebhook) -> dict[str, Any]:
    state = "parked" if each.parked else "done" if each.done_at else "waiting"
    return {
        "id": each.external_id,
        "type": each.type,
        "about": each.subject_id,
        "state": state,
        "received_at": each.received_at.isoformat(),
        "attempts": each.attempts,
        "reason": each.parked or each.last_error,
    }


def describe_case(case: DunningCase, label: str | None) -> dict[str, Any]:
    return {
        "invoice": label or case.invoice_id,
        "tenant_id": case.tenant_id,
        "reminders": case.step,
        "opened_at": case.opened_at.isoformat(),
        "next_at": case.next_at.isoformat() if case.next_at else None,
        "suspended_at": case.suspended_at.isoformat() if case.suspended_at else None,
        "closed_at": case.closed_at.isoformat() if case.closed_at else None,
        "outcome": case.outcome,
    }
