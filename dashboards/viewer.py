"""Who looks at a page, and the doors that the pages use: all that the composition root hands in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.orm import Session

from core.clock import Clock
from core.database import Database
from core.tenants.scope import TenantScope
from dashboards.ports import Gatehouse


@dataclass(frozen=True, slots=True)
class Viewer:
    """A signed-in person. `scope` proves that the tenant check was made."""

    scope: TenantScope
    tenant_name: str
    name: str  # the member's, or the key's
    role: str  # owner | admin | finance | developer | viewer | operator
    session_id: str
    currency: str = "USD"
    operator: bool = False


@dataclass(frozen=True, slots=True)
class SignedIn:
    cookie: str  # the secret that only the browser keeps
    viewer: Viewer


class Doorman(Protocol):
    """Sessions on the server: made at sign-in, found at each page, revocable at any time."""

    def sign_in(
        self, session: Session, *, email: str, password: str, secret: str, address: str
    ) -> SignedIn:
        """By e-mail and password, or by a key or the operator's token in `secret`.

        Raises Unauthenticated, or RateLimited after too many failures from one address.
        """
        ...

    def find(self, session: Session, cookie: str) -> Viewer | None: ...

    def sign_out(self, session: Session, cookie: str) -> None: ...

    def look_at(self, session: Session, viewer: Viewer, cookie: str, tenant: str) -> None:
        """The operator's session shows this tenant's pages from now on; NotFound, or Forbidden."""
        ...

    def may(self, viewer: Viewer, obj: str, act: str) -> bool:
        """Casbin's answer: whether this role may do this to that."""
        ...


@dataclass(frozen=True, slots=True)
class House:
    """What the pages are built on."""

    database: Database
    clock: Clock
    doorman: Doorman
    models: Callable[[TenantScope], list[str]]  # names that this tenant may ask for
    gatehouse: Gatehouse
    secure_cookies: bool = False  # behind TLS
    single_sign_on: bool = False
