"""The viewer of a page, and the dependencies of the dashboard, set by the composition root."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from sqlalchemy.orm import Session
from starlette.requests import Request

from billing.notices.alert_targets import AlertTargets
from core.clock import Clock
from core.database import Database
from core.tenants.members import PasswordProof
from core.tenants.models import Member
from core.tenants.scope import TenantScope
from dashboards.backend import DashboardBackend


@dataclass(frozen=True, slots=True)
class Viewer:
    """A signed-in user. `scope` proves that the tenant check was made."""

    scope: TenantScope
    tenant_name: str
    name: str  # name of the member or the key
    role: str  # owner | admin | finance | developer | viewer | operator
    currency: str = "USD"
    timezone: str = "UTC"  # of the tenant's days and months
    operator: bool = False


@dataclass(frozen=True, slots=True)
class SignedIn:
    cookie: str  # the secret stored in the browser only
    viewer: Viewer


class DashboardAuth(Protocol):
    """Server-side sessions: created at sign-in, looked up on each request, revocable at any time."""

    def sign_in(
        self, session: Session, *, proof: PasswordProof | None, secret: str, address: str
    ) -> SignedIn:
        """Sign in by what `members.check_password` returned, or else by an API key or the operator's
        token in `secret`, inside `attempt`. Raises Unauthenticated."""
        ...

    def attempt(self, address: str, *, give_back: bool = True) -> AbstractAsyncContextManager[None]:
        """Around an attempt to sign in. It counts in all gateway processes unless its body succeeds, or
        also then without `give_back`. RateLimited after too many failures from one address."""
        ...

    def sign_in_member(self, session: Session, member: Member) -> SignedIn:
        """Begin a session of a member who has been authenticated."""
        ...

    def find(self, session: Session, cookie: str, address: str = "") -> Viewer | None:
        """None if the session ended, or if its owner could not sign in now from this address."""
        ...

    def sign_out(self, session: Session, cookie: str) -> None: ...

    def look_at(self, session: Session, viewer: Viewer, cookie: str, tenant: str) -> None:
        """Make the operator's session show this tenant's pages. NotFound or Forbidden."""
        ...

    def may(self, viewer: Viewer, obj: str, act: str) -> bool:
        """Whether casbin allows the viewer's role this act on the object."""
        ...


@dataclass(frozen=True, slots=True)
class DashboardDeps:
    """Dependencies of the pages."""

    database: Database
    clock: Clock
    auth: DashboardAuth
    models: Callable[[TenantScope], list[str]]  # models that the tenant may use
    backend: DashboardBackend
    alert_targets: AlertTargets
    four_eyes_above: Decimal | None = None  # acts on money above it need a second operator
    secure_cookies: bool = False  # set if served over TLS
    single_sign_on: bool = False
    public_url: str = ""  # base of links in mails; empty: that of the request
    tasks_since: datetime | None = (
        None  # when this gateway began to run the tasks; None: workers do
    )


def is_secure(request: Request) -> bool:
    """Whether the browser came by TLS: to us, to a trusted proxy that says so, or by the public URL."""
    deps: DashboardDeps = request.app.state.deps
    return deps.secure_cookies or request.url.scheme == "https"
