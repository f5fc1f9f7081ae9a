"""The audit check of engines' receipts, which reach the database independently of usage events."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from billing.audit.usage import first_id
from billing.closing.late_receipts import waived_late
from billing.closing.row_sums import (
    BY_GATEWAY,
    FAILED,
    UNBILLED,
    WITHOUT_RECEIPT,
    RowSums,
    request_of,
)
from billing.differences import EVERYTHING, Difference, Since, lost
from billing.usage.border import border_of
from billing.usage.reading import known_elsewhere
from billing.usage.tables import EngineReceipt, ParkedEvent, UsageEventRow
from core.errors import DependencyDown

E, R = UsageEventRow, EngineReceipt


def receipts_and_events(
    session: Session,
    since: Since = EVERYTHING,
    received_before: datetime | None = None,
    rows: RowSums | None = None,
) -> list[Difference]:
    """Each receipt has an event with the same token counts, and each event that an engine counted has
    its receipt. What the gateway counted itself, as when its connection was lost, agrees in output
    alone: billed and waived tokens, with those that a late receipt waived, are what the engine
    generated. Receipts come by a way of their own, and before their events: with `received_before`
    those that have come since may still lack one.
    """
    if rows is not None and rows.receipts_agree:
        return []
    request = request_of(session)
    # Almost none is left to be grouped.
    orphans = (
        select(request)
        .select_from(R)
        .outerjoin(E, E.request_id == request)
        .outerjoin(ParkedEvent, ParkedEvent.request_id == request)
        .where(
            R.request_id >= first_id(session, since),
            E.request_id.is_(None),
            ParkedEvent.request_id.is_(None),
        )
        .group_by(request, R.engine_id)
    )
    if received_before is not None:
        orphans = orphans.having(func.max(R.received_at) < received_before)
    message = "the engine has a receipt, but there is no usage event"
    found = lost("receipts/events", message, _not_stored(session, session.scalars(orphans).all()))
    receipts = _receipts_by_request(session, since)
    both = (
        select(E.request_id)
        .join(
            receipts,
            and_(receipts.c.request_id == E.request_id, receipts.c.engine_id == E.engine_id),
        )
        .where(E.batch_id > since.batch, ~UNBILLED)
    )
    other = or_(
        and_(
            ~FAILED,
            or_(receipts.c.prompt != E.input_tokens, receipts.c.cached != E.cached_tokens),
        ),
        receipts.c.generated != E.output_tokens + E.waived_tokens,
    )
    time_differs = "the busy time of the engine's receipt and of the event differ"
    for message, wrong in (
        ("the token counts of the engine's receipt and of the event differ", ~BY_GATEWAY & other),
        (
            "more tokens are billed than the engine generated",
            BY_GATEWAY & (E.output_tokens > receipts.c.generated),
        ),
        (
            "tokens that the engine generated are neither billed nor waived, or more are",
            BY_GATEWAY
            & (E.output_tokens <= receipts.c.generated)
            & (E.output_tokens + E.waived_tokens + waived_late() != receipts.c.generated),
        ),
        (time_differs, ~BY_GATEWAY & (receipts.c.busy_us != E.busy_us)),
    ):
        ids = list(session.scalars(both.where(wrong)))
        if ids:
            count = len(ids)
            found.append(
                Difference("receipts/events", "amount", message, count, 0, tuple(ids[:20]))
            )
    alone = (
        select(E.request_id)
        .outerjoin(receipts, receipts.c.request_id == E.request_id)
        .where(
            E.batch_id > since.batch,
            E.request_id >= first_id(session, since),
            E.counted_by.is_not(None),
            ~BY_GATEWAY,
            ~UNBILLED,
            receipts.c.request_id.is_(None),
        )
    )
    message = "the engine counted the event, but there is no receipt"
    return found + lost("receipts/events", message, session.scalars(alone))


def _not_stored(session: Session, request_ids: Sequence[str]) -> list[str]:
    """Without those whose events are moved to their store: receipts may come late. While it does not
    answer, they are not judged."""
    border = border_of(session)
    if border is None:
        return list(request_ids)
    old = [each for each in request_ids if each < border.floor_id]
    try:
        known = known_elsewhere(session, old)
    except DependencyDown:
        known = set(old)
    return [each for each in request_ids if each not in known]


def _receipts_by_request(session: Session, since: Since) -> Any:
    """Receipts summed by request and engine."""
    request = request_of(session)
    return (
        select(
            request.label("request_id"),
            R.engine_id,
            func.sum(R.prompt_tokens).label("prompt"),
            func.sum(R.cached_tokens).label("cached"),
            func.sum(R.generated_tokens).label("generated"),
            func.sum(R.busy_us).label("busy_us"),
        )
        .where(R.request_id >= first_id(session, since))
        .group_by(request, R.engine_id)
        .subquery("receipts")
    )


def billed_without_receipt(
    session: Session, since: Since = EVERYTHING, rows: RowSums | None = None
) -> list[str]:
    """Request ids of generations on our engine that are billed by the gateway's own count, because no
    receipt came at all: its process was killed, or it never ran them."""
    if rows is not None and rows.receipts_complete:
        return []
    receipts = _receipts_by_request(session, since)
    return list(
        session.scalars(
            select(E.request_id)
            .outerjoin(receipts, receipts.c.request_id == E.request_id)
            .where(
                receipts.c.request_id.is_(None),
                E.batch_id > since.batch,
                E.request_id >= first_id(session, since),
                WITHOUT_RECEIPT,
            )
            .order_by(E.request_id)
        )
    )
