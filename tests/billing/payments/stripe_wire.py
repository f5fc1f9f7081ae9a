"""Stripe's answers as a test writes them, under Stripe's own library: no network, every call kept."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs, urlsplit

import stripe

Answer = dict[str, Any] | tuple[int, dict[str, Any]] | tuple[int, dict[str, Any], dict[str, str]]


def page(*data: dict[str, Any], more: bool = False) -> dict[str, Any]:
    return {"object": "list", "data": list(data), "has_more": more, "url": "/v1/x"}


def refusal(
    http: int, message: str = "no", type_: str = "invalid_request_error", **more: Any
) -> Any:
    return http, {"error": {"type": type_, "message": message, **more}}


@dataclass
class Call:
    method: str
    path: str
    form: dict[str, str]
    key: str  # of idempotency; "" for none


@dataclass
class Wire(stripe.HTTPClient):
    """Answers by the beginning of `METHOD path`, the longest first; a list is used up one by one."""

    answers: dict[str, Answer | list[Answer]] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    name = "wire"

    def __post_init__(self) -> None:
        super().__init__()

    def request(
        self, method: str, url: str, headers: Any, post_data: Any = None, **_: Any
    ) -> tuple[str, int, dict[str, str]]:
        parts = urlsplit(url)
        text = post_data.decode() if isinstance(post_data, bytes) else post_data or parts.query
        form = {name: values[0] for name, values in parse_qs(text, keep_blank_values=True).items()}
        path = parts.path.removeprefix("/v1/")
        key = headers.get("Idempotency-Key", "") if method.upper() == "POST" else ""
        self.calls.append(Call(method.upper(), path, form, key))
        wanted = f"{method.upper()} {path}"
        names = [name for name in self.answers if wanted.startswith(name)]
        assert names, f"{wanted} {form} has no answer"
        found = self.answers[max(names, key=len)]
        answer: Any = found.pop(0) if isinstance(found, list) else found
        if isinstance(answer, Exception):
            raise answer
        status, body, more = (*answer, {})[:3] if isinstance(answer, tuple) else (200, answer, {})
        return json.dumps(body), status, more

    def client(self) -> stripe.StripeClient:
        return stripe.StripeClient("sk_test_x", http_client=self, max_network_retries=0)

    def made(self) -> list[tuple[str, str]]:
        return [(each.method, each.path) for each in self.calls]

    def forms(self, start: str) -> list[dict[str, str]]:
        return [each.form for each in self.calls if f"{each.method} {each.path}".startswith(start)]


START = datetime(2026, 1, 1, tzinfo=UTC)
AT = int(START.timestamp())
INTENT = {
    "object": "payment_intent",
    "id": "pi_1",
    "status": "succeeded",
    "amount": 700,
    "amount_received": 650,
    "currency": "usd",
    "created": AT,
    "last_payment_error": None,
    "metadata": {"tollhouse_payment": "pay_1"},
}
INVOICE = {
    "object": "invoice",
    "id": "in_1",
    "status": "open",
    "currency": "usd",
    "total": 1000,
    "amount_remaining": 900,
    "attempt_count": 1,
    "hosted_invoice_url": "https://pay",
    "created": AT,
    "metadata": {"tollhouse_invoice": "inv_1"},
    "payments": page(),
}
