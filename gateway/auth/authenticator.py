"""From the header to a Principal. The keyring answers from memory; a new key costs one query."""

import asyncio
import logging

from sqlalchemy.exc import SQLAlchemyError

from core.errors import DependencyDown, Forbidden, InsufficientQuota, Unauthenticated
from core.tenants.keyring import Keyring
from core.tenants.keys import Principal, address_allowed
from gateway.auth.attempts import FailedAttempts
from gateway.exchange import Exchange

log = logging.getLogger("tollhouse.auth")
# What a tenant needs to see what it owes and to pay it, and what costs nothing.
WHILE_UNPAID = ("/admin/", "/v1/organization/", "/v1/exports", "/v1/models")


class Authenticator:
    def __init__(self, keyring: Keyring, attempts: FailedAttempts) -> None:
        self._keyring = keyring
        self.attempts = attempts

    async def principal(self, exchange: Exchange, route: str) -> Principal:
        """Unauthenticated, Forbidden by the key's scopes or the tenant's state, or RateLimited
        where an address guesses."""
        if exchange.principal is not None:
            if not exchange.principal.scopes.allows_route(route):
                raise _not_this_route(route)
            return exchange.principal
        secret = secret_of(exchange)
        try:
            found = self._keyring.known(secret)
            if found is None:
                self.attempts.check(exchange.address)
                found = await self._find(secret)
        except Unauthenticated:
            self.attempts.check(exchange.address)
            await self.attempts.failed(exchange.address)
            raise
        if found.unpaid and not route.startswith(WHILE_UNPAID):
            raise InsufficientQuota(
                "This organisation is suspended: an invoice is overdue.",
                next_step="Pay it: GET /admin/v1/invoices shows which, "
                "POST /admin/v1/payment-methods/setup leads to a page for a card.",
            )
        if not found.scopes.allows_route(route):
            raise _not_this_route(route)
        if not address_allowed(found.allowed_ips, exchange.address):
            raise Forbidden(
                f"This key may not be used from {exchange.address}.",
                next_step="Call from an address on the key's list.",
            )
        return found

    async def _find(self, secret: str) -> Principal:
        try:
            return await asyncio.to_thread(self._keyring.find, secret)
        except SQLAlchemyError as error:
            log.error("a key could not be looked up: %s", str(error).partition("\n")[0])
            raise DependencyDown(
                "The key cannot be checked: the database does not answer.",
                next_step="Try again shortly.",
                retry_after_s=2.0,
            ) from None


def _not_this_route(route: str) -> Forbidden:
    return Forbidden(f"This key may not call {route}.", next_step="Use a key that may.")


def secret_of(exchange: Exchange) -> str:
    """`Authorization: Bearer …`, or Anthropic's `x-api-key`; two different answers are refused."""
    if b"authorization" in exchange.repeated or b"x-api-key" in exchange.repeated:
        raise Unauthenticated(
            "The request carries its key more than once.", next_step="Send one header."
        )
    bearer = exchange.headers.get(b"authorization")
    other = exchange.headers.get(b"x-api-key")
    if bearer is not None:
        kind, _, secret = bearer.decode("latin-1").partition(" ")
        if kind.lower() == "bearer" and secret.strip():
            if other is not None and other.decode("latin-1").strip() != secret.strip():
                raise Unauthenticated(
                    "Authorization and x-api-key name two keys.", next_step="Send one of them."
                )
            return secret.strip()
    if other:
        return other.decode("latin-1").strip()
    if bearer is not None:
        raise Unauthenticated(
            "The Authorization header holds no key.", next_step="Write it as `Bearer th_…`."
        )
    raise Unauthenticated("No API key was sent.", next_step="Send `Authorization: Bearer th_…`.")
