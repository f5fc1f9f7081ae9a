"""Transactional outbox for webhooks and emails: queued with their cause, sent after commit, retried
with exponential backoff, marked as failed after `MAX_ATTEMPTS` (about two hours).

A message is claimed in one transaction, sent outside of any, and its outcome is recorded in another, so
that a receiver never holds a lock. Messages are sent at the same time, but only a few of one tenant and
one at a time to a target, so that a slow receiver delays its own tenant at most.
"""

import hashlib
import random
import smtplib
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from email.message import EmailMessage
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from billing.notices import mail_text, signing
from billing.notices.message_shapes import FORMATS, Shape
from billing.notices.tables import Budget, OutboxMessage, WebhookEndpoint
from core import lengths
from core.clock import Clock, SystemClock
from core.database import Database, check_no_transaction, insert_new
from core.errors import SettingError, Unavailable
from core.outbound import encode_json, hang_up_after, post_json

MAX_ATTEMPTS = 12
BUDGET = "bud_"  # of ids of budgets, which sign messages to URLs of their own
LINK = mail_text.LINK
TIMEOUT_S = 10.0  # of a whole exchange with a receiver
TOGETHER = 16  # messages sent at the same time
OF_A_TENANT = 4
# A message that was claimed is tried again after so long if the process that claimed it died.
LEASE_S = 120.0
_LOOK_EVERY_S = 1.0  # for messages that became due while others are being sent
_RUN_S = 10.0  # after which a run claims nothing more: it occupies one of a worker's few processes


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A claimed message. `secret` signs it; None: it is not signed."""

    id: int
    tenant_id: str | None
    channel: str
    target: str
    subject: str
    payload: Mapping[str, Any]
    dedupe: str
    attempt: int
    secret: str | None = None
    shape: Shape = field(default_factory=Shape)


class Sender(Protocol):
    def send(self, message: Outgoing) -> None:
        """Deliver the message; raises if it is not delivered. Several threads call it."""
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
    signer: str | None = None,
    now: datetime,
) -> int:
    """Queue one message per target and `dedupe`; returns the number of new ones. `endpoints` are
    (id, url) pairs; their messages are signed. `signer` is the budget that signs those to `webhooks`."""
    targets = [
        *(("webhook", url, signer, url) for url in webhooks),
        *(("email", to, None, to) for to in emails),
        *(("webhook", url, endpoint_id, endpoint_id) for endpoint_id, url in endpoints),
    ]
    rows = [
        {
            "tenant_id": tenant_id,
            "channel": channel,
            "endpoint_id": endpoint_id,
            "target": target,
            "subject": subject[:200],
            "payload": payload,
            "dedupe": _dedupe(dedupe, unique),
            "created_at": now,
            "next_at": now,
            "attempts": 0,
            "failed": False,
        }
        for channel, target, endpoint_id, unique in targets
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
    """Send up to `limit` due messages; returns how many were delivered."""
    sending: dict[Future[None], Outgoing] = {}
    sent, ends = 0, clock.monotonic() + _RUN_S
    with ThreadPoolExecutor(TOGETHER, thread_name_prefix="tollhouse-message") as pool:
        while True:
            if limit > 0 and clock.monotonic() < ends:
                for message in _claim(database, clock, limit, len(sending)):
                    limit -= 1
                    sending[pool.submit(sender.send, message)] = message
            if not sending:
                return sent
            done, _ = wait(sending, _LOOK_EVERY_S, FIRST_COMPLETED)
            for future in done:
                sent += _record(database, clock, sending.pop(future), future.exception())


def _claim(database: Database, clock: Clock, limit: int, sending: int = 0) -> list[Outgoing]:
    """Lease due messages, the oldest first, as far as threads, tenants and targets are free. `sending`
    is how many this run sends already."""
    limit, now = min(limit, TOGETHER - sending), clock.now()
    claimed: list[Outgoing] = []
    # The common case is that nothing is due: a write transaction would take SQLite's lock for nothing.
    if limit <= 0 or not _is_any_due(database, now):
        return claimed
    with database.transaction() as session:
        # Also what other processes send.
        busy = session.execute(
            select(OutboxMessage.tenant_id, OutboxMessage.target).where(
                OutboxMessage.done_at.is_(None), OutboxMessage.leased_until > now
            )
        ).all()
        of_tenant, targets = (
            Counter(each.tenant_id for each in busy),
            {each.target for each in busy},
        )
        while len(claimed) < limit:
            message = session.scalar(_next_due(now, of_tenant, targets))
            if message is None:
                break
            message.attempts += 1
            message.leased_until = message.next_at = now + timedelta(seconds=LEASE_S)
            session.flush()
            of_tenant[message.tenant_id] += 1
            targets.add(message.target)
            claimed.append(_outgoing(session, message))
    return claimed


def _is_any_due(database: Database, now: datetime) -> bool:
    with database.read() as session:
        return session.scalar(_due(now).with_only_columns(OutboxMessage.id).limit(1)) is not None


def _due(now: datetime) -> Select[OutboxMessage]:
    return select(OutboxMessage).where(
        OutboxMessage.done_at.is_(None), OutboxMessage.next_at <= now
    )


def _next_due(
    now: datetime, of_tenant: Mapping[str | None, int], targets: Iterable[str]
) -> Select[OutboxMessage]:
    full = [each for each, count in of_tenant.items() if count >= OF_A_TENANT and each is not None]
    # Messages of no tenant are the operator's own.
    is_free = OutboxMessage.tenant_id.is_(None) | OutboxMessage.tenant_id.not_in(full)
    return (
        _due(now)
        .where(is_free, OutboxMessage.target.not_in(list(targets)))
        .order_by(OutboxMessage.next_at, OutboxMessage.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def _outgoing(session: Session, message: OutboxMessage) -> Outgoing:
    secret, signer, shape = None, message.endpoint_id, Shape()
    if signer is not None and signer.startswith(BUDGET):
        secret = session.get_one(Budget, signer).webhook_secret
    elif signer is not None:
        endpoint = session.get_one(WebhookEndpoint, signer)
        secret = endpoint.secret
        if endpoint.format in FORMATS:  # those of request records are of other receivers
            shape = Shape(endpoint.format, endpoint.authorization)
    return Outgoing(
        message.id,
        message.tenant_id,
        message.channel,
        message.target,
        message.subject,
        message.payload,
        message.dedupe,
        message.attempts,
        secret,
        shape,
    )


def _record(database: Database, clock: Clock, sent: Outgoing, problem: BaseException | None) -> int:
    """Write the outcome, unless the message was ended or claimed again meanwhile."""
    with database.transaction() as session:
        message = session.get(OutboxMessage, sent.id, with_for_update=True)
        if message is None or message.done_at is not None or message.attempts != sent.attempt:
            return 0
        message.leased_until = None
        if problem is None:
            message.done_at, message.last_error = clock.now(), None
            _forget_link(message)
            return 1
        message.last_error = f"{type(problem).__name__}: {problem}"[:500]
        if message.attempts >= MAX_ATTEMPTS:
            message.failed, message.done_at = True, clock.now()
            _forget_link(message)
        else:
            pause = min(3600.0, 5.0 * 2 ** (message.attempts - 1)) * random.uniform(0.5, 1.0)
            message.next_at = clock.now() + timedelta(seconds=pause)
        return 0


def _forget_link(message: OutboxMessage) -> None:
    if LINK in message.payload:
        message.payload = {name: it for name, it in message.payload.items() if name != LINK}


class NetworkSender:
    """Sends webhooks as JSON by HTTP POST and emails by SMTP."""

    def __init__(
        self,
        smtp_url: str,
        sender_address: str = "billing@tollhouse.invalid",
        *,
        networks: tuple[str, ...] = (),
        clock: Clock | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`networks` are private networks that webhooks may reach in addition to public addresses;
        `timeout_s` is the limit of a whole exchange."""
        self._networks = networks
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._smtp = urlsplit(smtp_url) if smtp_url else None
        self._from = sender_address

    def send(self, message: Outgoing) -> None:
        if message.channel == "webhook":
            self._post(message)
        else:
            self._mail(message)

    def _post(self, message: Outgoing) -> None:
        headers = {"idempotency-key": message.dedupe}
        payload = message.shape.body(message.subject, message.payload, message.dedupe)
        if message.secret is not None:
            body = encode_json(payload)
            headers |= signing.headers(message.secret, message.dedupe, self._clock.now(), body)
        status = post_json(
            message.target,
            payload,
            headers,
            timeout_s=self._timeout_s,
            private=self._networks,
        )
        if status >= 300:
            raise OSError(f"the webhook returned status {status}")

    def _mail(self, message: Outgoing) -> None:
        if self._smtp is None or self._smtp.hostname is None:
            raise SettingError(
                "No mail server is set.", next_step="Set TOLLHOUSE_SMTP_URL, smtp://host:port."
            )
        check_no_transaction("a mail")
        mail = EmailMessage()
        mail["Subject"], mail["From"], mail["To"] = message.subject, self._from, message.target
        mail.set_content(mail_text.text_of(message.subject, message.payload))
        secure = self._smtp.scheme == "smtps"
        opened: list[smtplib.SMTP] = []
        kind = _SecureConnection if secure else _Connection
        host, port, limit_s = self._smtp.hostname, self._smtp.port or 25, self._timeout_s
        with hang_up_after(limit_s, lambda: opened[0].sock if opened else None) as deadline:
            try:
                with kind(opened, host, port, timeout=limit_s) as server:
                    if self._smtp.username:
                        server.login(
                            unquote(self._smtp.username), unquote(self._smtp.password or "")
                        )
                    server.send_message(mail)
            except (OSError, ValueError):
                if not deadline.is_over:
                    raise
                raise Unavailable(
                    f"The mail server {host} took no mail in {limit_s:g} s.",
                    next_step="Check the server in TOLLHOUSE_SMTP_URL.",
                ) from None


class _Connection(smtplib.SMTP):
    """Is in `opened` before it connects, so that a deadline can end a slow greeting, too."""

    def __init__(self, opened: list[smtplib.SMTP], host: str, port: int, *, timeout: float) -> None:
        opened.append(self)
        super().__init__(host, port, timeout=timeout)


class _SecureConnection(smtplib.SMTP_SSL):
    def __init__(self, opened: list[smtplib.SMTP], host: str, port: int, *, timeout: float) -> None:
        opened.append(self)
        # smtplib's own context would accept any certificate.
        verified = ssl.create_default_context()
        super().__init__(host, port, timeout=timeout, context=verified)
