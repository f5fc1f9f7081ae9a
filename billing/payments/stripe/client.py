"""Calls to Stripe, with its errors mapped to the port's TryLater, Gone and Refused.

The library's own retries are off: the outbox retries under the same idempotency keys. Stripe replays a
stored 500 under its key for a day; once a retry has found nothing done, the step uses a new key.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import stripe

from billing.payments.base import Attempt, Gone, Refused, TryLater
from core.errors import SettingError

Result = TypeVar("Result")
TIMEOUT_S = 20.0
USER_AGENT = "tollhouse"


def make_client(
    api_key: str, api_base: str = "", timeout_s: float = TIMEOUT_S
) -> stripe.StripeClient:
    """Create a client. Raises SettingError if `api_base` is not a URL."""
    base: Any = {"api": check_base(api_base)} if api_base else {}
    return stripe.StripeClient(
        api_key,
        base_addresses=base,
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=timeout_s),
    )


def check_base(address: str) -> str:
    """Validate the URL; returns it without a trailing slash, as the library expects."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise SettingError(
            f"TOLLHOUSE_STRIPE_API_BASE is {address[:80]!r}, which is not an http(s) URL.",
            next_step="Set it to https://host, or leave it empty for Stripe itself.",
        )
    return address.rstrip("/")


def ask(call: Callable[[], Result]) -> Result:
    """Call and map errors to TryLater, Gone or Refused; a CardError is passed on."""
    try:
        return call()
    except stripe.CardError:
        raise
    except stripe.RateLimitError as error:
        raise TryLater(_message(error), _after(error)) from error
    except (stripe.AuthenticationError, stripe.PermissionError) as error:
        raise TryLater(f"Stripe rejects the API key: {_message(error)}", 300.0) from error
    except stripe.IdempotencyError as error:
        if error.http_status == 409:
            raise TryLater(_message(error)) from error
        raise Refused(_message(error)) from error
    except stripe.InvalidRequestError as error:
        if error.http_status == 404:
            raise Gone(_message(error)) from error
        raise Refused(_message(error)) from error
    except stripe.StripeError as error:  # connection, 409, 5xx
        raise TryLater(_message(error), _after(error)) from error


def list_all(call: Callable[[], Any]) -> Iterator[Any]:
    """Iterate over all pages of a list call."""
    found = iter(ask(call).auto_paging_iter())
    while (each := ask(lambda: next(found, None))) is not None:
        yield each


def change(attempt: Attempt, step: str, call: Callable[[dict[str, Any]], Result]) -> Result:
    """Make a changing call under the idempotency key of the step."""
    options = {"idempotency_key": attempt.key_of(step)}
    try:
        return ask(lambda: call(options))
    except TryLater as error:
        cause = error.__cause__
        kept = isinstance(cause, stripe.StripeError) and (cause.http_status or 0) >= 500
        if kept and attempt.again and (cause.headers or {}).get("idempotent-replayed") == "true":  # type: ignore[union-attr]
            # The caller has checked that nothing was done.
            attempt.turn(step)
        raise


def metadata_value(found: Any, name: str) -> str:
    """A metadata value of an object; empty if it is missing."""
    metadata = getattr(found, "metadata", None)
    return str(metadata.to_dict().get(name) or "") if metadata else ""


def _message(error: stripe.StripeError) -> str:
    return (error.user_message or str(error))[:400]


def _after(error: stripe.StripeError) -> float | None:
    try:
        return float((error.headers or {}).get("retry-after", ""))
    except ValueError:
        return None
