"""Authenticates a request by its API key. Known keys are cached; a new key costs one query."""

import asyncio
import logging

from sqlalchemy.exc import SQLAlchemyError

from core.errors import DependencyDown, Forbidden, InsufficientQuota, Unauthenticated
from core.tenants.key_cache import KeyCache
from core.tenants.keys import Principal, address_allowed
from gateway.edge.auth.attempts import FailedAttempts
from gateway.edge.threads import Work, current_tenant, run_as
from gateway.request.exchange import Exchange

log = logging.getLogger("tollhouse.auth")
# Routes that a suspended tenant may call: to see and pay what it owes, and routes that are free.
ROUTES_WHILE_SUSPENDED = (
    "/admin/",
    "/v1/organization/",
    "/v1/exports",
    "/v1/events",
    "/v1/models",
    "/mcp",
)


class Authenticator:
    def __init__(
        self, key_cache: KeyCache, attempts: FailedAttempts, sign_ins: FailedAttempts
    ) -> None:
        """`sign_ins` limits how often an address may begin to sign in at another issuer."""
        self._key_cache = key_cache
        self.attempts = attempts
        self.sign_ins = sign_ins
        self._one_by_one = asyncio.Semaphore(1)

    async def principal(self, exchange: Exchange, route: str) -> Principal:
        """Raises Unauthenticated, Forbidden (scopes or address), InsufficientQuota (suspended), or
        RateLimited after too many failures from one address."""
        if exchange.principal is not None:
            if not exchange.principal.scopes.allows_route(route):
                raise _route_forbidden(route)
            return exchange.principal
        secret = secret_of(exchange)
        try:
            principal = self._key_cache.cached(secret)
            if principal is None:
                principal = await self._look_up(secret, exchange.address)
        except Unauthenticated:
            self.attempts.check(exchange.address)
            await self.attempts.failed(exchange.address)
            raise
        if principal.unpaid and not route.startswith(ROUTES_WHILE_SUSPENDED):
            raise suspended()
        if not principal.scopes.allows_route(route):
            raise _route_forbidden(route)
        if not address_allowed(principal.allowed_ips, exchange.address):
            raise Forbidden(
                f"This key may not be used from {exchange.address}.",
                next_step="Call from an address on the key's allow list.",
            )
        current_tenant.set(principal.tenant_id)
        return principal

    async def _look_up(self, secret: str, address: str) -> Principal:
        """An address with too many failures is looked up one key at a time: others behind the same
        proxy may have valid keys, and a flood of wrong ones must not occupy the database."""
        if not self.attempts.is_blocked(address):
            return await self._find(secret)
        async with self._one_by_one:
            return await self._find(secret)

    async def _find(self, secret: str) -> Principal:
        try:
            return await run_as(Work.KEYS, self._key_cache.find, secret)
        except SQLAlchemyError as error:
            log.error("a key could not be looked up: %s", str(error).partition("\n")[0])
            raise DependencyDown(
                "The API key cannot be checked: the database does not answer.",
                next_step="Try again shortly.",
                retry_after_s=2.0,
            ) from None


def suspended() -> InsufficientQuota:
    return InsufficientQuota(
        "This organisation is suspended: an invoice is overdue.",
        next_step="Pay it: GET /admin/v1/invoices lists invoices, and "
        "POST /admin/v1/payment-methods/setup returns a page for adding a card.",
    )


def _route_forbidden(route: str) -> Forbidden:
    return Forbidden(
        f"This key may not call {route}.", next_step="Use a key whose scope includes the route."
    )


def secret_of(exchange: Exchange) -> str:
    """The key in `Authorization: Bearer …` or in Anthropic's `x-api-key`. Two keys are refused."""
    if b"authorization" in exchange.repeated or b"x-api-key" in exchange.repeated:
        raise Unauthenticated(
            "The request has more than one header with an API key.", next_step="Send one header."
        )
    bearer = exchange.headers.get(b"authorization")
    other = exchange.headers.get(b"x-api-key")
    if bearer is not None:
        kind, _, secret = bearer.decode("latin-1").partition(" ")
        if kind.lower() == "bearer" and secret.strip():
            if other is not None and other.decode("latin-1").strip() != secret.strip():
                raise Unauthenticated(
                    "Authorization and x-api-key contain different keys.",
                    next_step="Send one of them.",
                )
            return secret.strip()
    if other:
        return other.decode("latin-1").strip()
    if bearer is not None:
        raise Unauthenticated(
            "The Authorization header contains no API key.",
            next_step="Write it as `Bearer th_…`.",
        )
    raise Unauthenticated("No API key was sent.", next_step="Send `Authorization: Bearer th_…`.")
