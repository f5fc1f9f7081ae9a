"""Transactional outbox for webhooks and emails: queued with their cause, sent after commit, retried
with exponential backoff, marked as failed after `MAX_ATTEMPTS` (about two hours).
"""

import hashlib
import random
import smtplib
from collections.abc import Iterable
from datetime import datetime, timedelta
from email.message import EmailMessage
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sqlalchemy import select
from sqlalchemy.orm import Session, object_session

from billing import signing
from billing.models import OutboxMessage, WebhookEndpoint
from core import lengths
from core.clock import Clock, SystemClock
from core.database import Database, insert_new
from core.errors import SettingError
from core.outbound import encode_json, post_json

MAX_ATTEMPTS = 12
TIMEOUT_S = 10.0


class Sender(Protocol):
    def send(self, message: OutboxMessage) -> None:
        """Deliver the message; raises if it is not delivered."""
        ...


def put(
    session: Session,
    *,
    tenant_id: str | None,
    subject: str,
    payload: dict[str, Any],
    dedupe: str,
    webhooks: Iterable[str] = (),
    emails: Iterable[str] = (),
    endpoints: Iterable[tuple[str, str]] = (),
    now: datetime,
) -> int:
    """Queue one message per target and `dedupe`; returns the number of new ones. `endpoints` are
    (id, url) pairs; their messages are signed."""
    targets = [
        *(("webhook", url, None) for url in webhooks),
        *(("email", to, None) for to in emails),
        *(("webhook", url, endpoint_id) for endpoint_id, url in endpoints),
    ]
    rows = [
        {
            "tenant_id": tenant_id,
            "channel": channel,
            "endpoint_id": endpoint_id,
            "target": target,
            "subject": subject[:200],
            "payload": payload,
            "dedupe": _dedupe(dedupe, endpoint_id or target),
            "created_at": now,
            "next_at": now,
            "attempts": 0,
            "failed": False,
        }
        for channel, target, endpoint_id in targets
    ]
    return insert_new(session, OutboxMessage.__table__, rows, "dedupe")  # type: ignore[arg-type]


def _dedupe(cause: str, target: str) -> str:
    """Another one for every cause and target: long addresses often differ at their end alone."""
    whole = f"{cause}:{target}"
    if len(whole) <= lengths.DEDUPE:
        return whole
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return f"{whole[: lengths.DEDUPE - len(digest) - 1]}:{digest}"


def deliver(database: Database, clock: Clock, sender: Sender, limit: int = 100) -> int:
    """Send due messages, one per transaction; returns how many were delivered."""
    sent = 0
    for _ in range(limit):
        with database.transaction() as session:
            message = session.scalar(
                select(OutboxMessage)
                .where(OutboxMessage.done_at.is_(None), OutboxMessage.next_at <= clock.now())
                .order_by(OutboxMessage.next_at, OutboxMessage.id)
                .limit(1)
                .with_for_update(skip_locked=True)
            )
            if message is None:
                return sent
            sent += _try(message, clock, sender)
    return sent


def _try(message: OutboxMessage, clock: Clock, sender: Sender) -> int:
    message.attempts += 1
    try:
        sender.send(message)
    except Exception as error:
        message.last_error = f"{type(error).__name__}: {error}"[:500]
        if message.attempts >= MAX_ATTEMPTS:
            message.failed, message.done_at = True, clock.now()
        else:
            pause = min(3600.0, 5.0 * 2 ** (message.attempts - 1)) * random.uniform(0.5, 1.0)
            message.next_at = clock.now() + timedelta(seconds=pause)
        return 0
    message.done_at, message.last_error = clock.now(), None
    return 1


def _signed(message: OutboxMessage, now: datetime) -> dict[str, str]:
    """Signature headers of an endpoint's message; a budget's URL has no secret."""
    session = object_session(message)
    if message.endpoint_id is None or session is None:
        return {}
    endpoint = session.get_one(WebhookEndpoint, message.endpoint_id)
    body = encode_json(message.payload)
    return signing.headers(endpoint.secret, message.dedupe, now, body)


class NetworkSender:
    """Sends webhooks as JSON by HTTP POST and emails by SMTP."""

    def __init__(
        self,
        smtp_url: str,
        sender_address: str = "billing@tollhouse.invalid",
        *,
        networks: tuple[str, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        """`networks` are private networks that webhooks may reach in addition to public addresses."""
        self._networks = networks
        self._clock = clock or SystemClock()
        self._smtp = urlsplit(smtp_url) if smtp_url else None
        self._from = sender_address

    def send(self, message: OutboxMessage) -> None:
        if message.channel == "webhook":
            self._post(message)
        else:
            self._mail(message)

    def _post(self, message: OutboxMessage) -> None:
        status = post_json(
            message.target,
            message.payload,
            {"idempotency-key": message.dedupe, **_signed(message, self._clock.now())},
            timeout_s=TIMEOUT_S,
            private=self._networks,
        )
        if status >= 300:
            raise OSError(f"the webhook returned status {status}")

    def _mail(self, message: OutboxMessage) -> None:
        if self._smtp is None or self._smtp.hostname is None:
            raise SettingError(
                "No mail server is set.", next_step="Set TOLLHOUSE_SMTP_URL, smtp://host:port."
            )
        mail = EmailMessage()
        mail["Subject"], mail["From"], mail["To"] = message.subject, self._from, message.target
        fields = {name: value for name, value in message.payload.items() if value != ""}
        lines = [f"{name}: {value}" for name, value in fields.items()]
        mail.set_content("\n".join([message.subject + ".", "", *lines]))
        port = self._smtp.port or 25
        secure = self._smtp.scheme == "smtps"
        made = smtplib.SMTP_SSL if secure else smtplib.SMTP
        with made(self._smtp.hostname, port, timeout=TIMEOUT_S) as server:
            if self._smtp.username:
                server.login(unquote(self._smtp.username), unquote(self._smtp.password or ""))
            server.send_message(mail)
