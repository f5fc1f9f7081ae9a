"""Webhooks of the fake server: signing, shuffling and sending."""

import http.client
import json
import random
from collections.abc import Iterable
from urllib.parse import urlsplit

from stripe import WebhookSignature

from billing.payments.fake_stripe.objects import Object
from core.clock import SystemClock


def signed(event: Object, secret: str) -> tuple[bytes, str]:
    """The body and its `Stripe-Signature`, whose timestamp is real time, not the fake clock's."""
    text = json.dumps(event)
    moment = int(SystemClock().now().timestamp())
    return text.encode(), WebhookSignature.generate_signature_header(text, secret, moment)


def shuffled(events: Iterable[Object], seed: int, copies: int = 1) -> list[Object]:
    """Each event `copies` times, in random order."""
    sent = [event for event in events for _ in range(copies)]
    random.Random(seed).shuffle(sent)
    return sent


def post(event: Object, url: str, secret: str) -> int:
    """Send one event; returns the response status."""
    body, signature = signed(event, secret)
    parts = urlsplit(url)
    link = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=10)
    try:
        headers = {"content-type": "application/json", "stripe-signature": signature}
        link.request("POST", parts.path, body, headers)
        answer = link.getresponse()
        answer.read()
        return answer.status
    finally:
        link.close()
