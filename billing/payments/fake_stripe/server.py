"""The fake Stripe HTTP server: checks API keys, replays idempotent responses, injects faults."""

import copy
import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from billing.payments.fake_stripe import routes
from billing.payments.fake_stripe.customers import leave_card
from billing.payments.fake_stripe.faults import Fault, Faults
from billing.payments.fake_stripe.forms import decode
from billing.payments.fake_stripe.objects import ApiError
from billing.payments.fake_stripe.state import StripeState

_PAGE = """<!doctype html><meta charset="utf-8"><title>Save a card</title>
<form method="post"><h1>Save a card</h1><p><label>Last four digits
<input name="card" value="4242" pattern="[0-9]{4}"></label> <button>Save</button>
<p>4242 succeeds; charges of 0341, 9995 and 0069 are declined.</form>"""


@dataclass(frozen=True, slots=True)
class _StoredResponse:
    """The request and response stored under an idempotency key."""

    request: tuple[str, str]
    status: int
    body: dict[str, Any]


class _DropConnection(Exception):
    """The connection closes without a response."""


class FakeStripe:
    """`with FakeStripe(key) as stripe:` serves on `stripe.url`. `books` is its state, `faults` its
    injected faults.
    """

    def __init__(
        self, api_key: str = "sk_test_fake", books: StripeState | None = None, port: int = 0
    ):
        self.api_key = api_key
        self.books = books or StripeState()
        self.faults = Faults()
        self.lock = threading.RLock()
        self.calls: list[str] = []
        self._responses: dict[str, _StoredResponse] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeStripe":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve_forever(self) -> None:
        self._server.serve_forever()

    def answer(
        self, call: str, text: str, authorised: bool, key: str | None
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        """(status, body, headers) of one call; raises _Silence to close the connection."""
        with self.lock:
            self.calls.append(call)
            if not authorised:
                error = ApiError(401, "Invalid API Key provided.", kind="invalid_request_error")
                return error.status, error.body, {}
            fault = self.faults.next_fault(call)
            if fault is Fault.LOST:
                raise _DropConnection
            if fault is Fault.LIMITED:
                error = ApiError(429, "Request rate limit exceeded.", code="rate_limit")
                return 429, error.body, {"retry-after": "2"}
            if fault is Fault.BUSY:
                return 409, _conflict().body, {}
            known = self._responses.get(key) if key else None
            if known is not None and key is not None:
                if known.request != (call, text):
                    return 400, _reused(key).body, {}
                return known.status, known.body, {"idempotent-replayed": "true"}
            status, body = self._done(call, text, fault)
            if key:
                self._responses[key] = _StoredResponse((call, text), status, body)
            if fault is Fault.TIMEOUT_AFTER:
                raise _DropConnection
            return status, body, {}

    def forget_keys(self) -> None:
        """Drop stored idempotency keys, as Stripe does after a day."""
        self._responses.clear()

    def _done(self, call: str, text: str, fault: Fault | None) -> tuple[int, dict[str, Any]]:
        broken = ApiError(500, "An unknown error occurred.", kind="api_error")
        if fault is Fault.BROKEN:
            return 500, broken.body
        try:
            made = routes.answer(self.books, call, decode(text), self.url)
        except ApiError as error:
            return error.status, copy.deepcopy(error.body)
        if fault is Fault.BROKEN_AFTER:
            return 500, broken.body
        return 200, copy.deepcopy(made)


def _conflict() -> ApiError:
    return ApiError(
        409, "Another request with this idempotency key is in progress.", kind="idempotency_error"
    )


def _reused(key: str) -> ApiError:
    return ApiError(
        400, f"Idempotency key {key} was used for a different request.", kind="idempotency_error"
    )


def _handler(stripe: FakeStripe) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 65_536  # headers and body in one packet
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._serve("GET", urlsplit(self.path).query)

        def do_POST(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            self._serve("POST", self.rfile.read(length).decode())

        def _serve(self, method: str, text: str) -> None:
            path = urlsplit(self.path).path
            if path.startswith("/checkout/"):
                self._checkout(path.rpartition("/")[2], method, text)
                return
            authorised = self.headers.get("authorization") == f"Bearer {stripe.api_key}"
            key = self.headers.get("idempotency-key") if method == "POST" else None
            try:
                status, body, headers = stripe.answer(f"{method} {path}", text, authorised, key)
            except _DropConnection:
                self.close_connection = True
                self.connection.close()
                return
            headers |= {"content-type": "application/json", "request-id": "req_fake"}
            self._send(status, json.dumps(body).encode(), headers)

        def _checkout(self, name: str, method: str, text: str) -> None:
            with stripe.lock:
                try:
                    session = stripe.books.get("checkout.session", name)
                except ApiError as error:
                    self._send(error.status, str(error).encode(), {})
                    return
                if method == "GET":
                    self._send(200, _PAGE.encode(), {"content-type": "text/html; charset=utf-8"})
                    return
                leave_card(stripe.books, session["customer"], decode(text).get("card", "4242"))
            self._send(303, b"", {"location": session["success_url"]})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in (headers | {"content-length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: `FakeStripe.calls` records the calls."""

    return Handler
