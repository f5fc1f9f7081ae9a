"""Calls to Stripe, and its errors as the port's: try later, or refused.

The outbox retries, with its own pauses and the same idempotency keys, so the library does not. A key
whose kept answer is a 500 gives that answer for a day; after looking that nothing was done the step
goes on under the next key.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import stripe

from billing.payments.base import Attempt, Gone, Refused, TryLater
from core.errors import SettingError

Result = TypeVar("Result")
TIMEOUT_S = 20.0
# The version that this library was made for; an account's default may be older.
USER_AGENT = "tollhouse"


def make_client(
    api_key: str, api_base: str = "", timeout_s: float = TIMEOUT_S
) -> stripe.StripeClient:
    """SettingError where the address is none."""
    base: Any = {"api": check_base(api_base)} if api_base else {}
    return stripe.StripeClient(
        api_key,
        base_addresses=base,
        max_network_retries=0,
        http_client=stripe.RequestsClient(timeout=timeout_s),
    )


def check_base(address: str) -> str:
    """Without a slash at its end, as the library wants it."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise SettingError(
            f"TOLLHOUSE_STRIPE_API_BASE is no address: {address[:80]!r}.",
            next_step="Write https://host, or leave it empty for Stripe's own.",
        )
    return address.rstrip("/")


def ask(call: Callable[[], Result]) -> Result:
    """TryLater, Gone, Refused; card errors come through for who charges a card."""
    try:
        return call()
    except stripe.CardError:
        raise
    except stripe.RateLimitError as error:
        raise TryLater(_said(error), _after(error)) from error
    except (stripe.AuthenticationError, stripe.PermissionError) as error:
        raise TryLater(f"Stripe refuses the key: {_said(error)}", 300.0) from error
    except stripe.IdempotencyError as error:
        if error.http_status == 409:
            raise TryLater(_said(error)) from error
        raise Refused(_said(error)) from error
    except stripe.InvalidRequestError as error:
        if error.http_status == 404:
            raise Gone(_said(error)) from error
        raise Refused(_said(error)) from error
    except stripe.StripeError as error:  # connection, 409, 5xx
        raise TryLater(_said(error), _after(error)) from error


def every(call: Callable[[], Any]) -> Iterator[Any]:
    """Every object of a listing, page by page."""
    found = iter(ask(call).auto_paging_iter())
    while (each := ask(lambda: next(found, None))) is not None:
        yield each


def do(attempt: Attempt, step: str, call: Callable[[dict[str, Any]], Result]) -> Result:
    """A call that changes something, under the step's key."""
    options = {"idempotency_key": attempt.key_of(step)}
    try:
        return ask(lambda: call(options))
    except TryLater as error:
        cause = error.__cause__
        kept = isinstance(cause, stripe.StripeError) and (cause.http_status or 0) >= 500
        if kept and attempt.again and (cause.headers or {}).get("idempotent-replayed") == "true":  # type: ignore[union-attr]
            # Whoever comes here has looked and found nothing done.
            attempt.turn(step)
        raise


def noted(found: Any, name: str) -> str:
    """What stands in an object's metadata; empty if nothing."""
    metadata = getattr(found, "metadata", None)
    return str(metadata.to_dict().get(name) or "") if metadata else ""


def _said(error: stripe.StripeError) -> str:
    return (error.user_message or str(error))[:400]


def _after(error: stripe.StripeError) -> float | None:
    try:
        return float((error.headers or {}).get("retry-after", ""))
    except ValueError:
        return None
