"""Whose issuer signs a person in: the tenant's own, or the deployment's.

Which one a sign-in was started with is in its signed cookie, so that an answer is taken from that issuer
alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.database import Database
from core.errors import BadRequest, NotFound
from core.outbound import check_address, check_public
from core.sealed_columns import check_opened
from core.tenants import invitations, sign_on_connections
from gateway.edge.auth.single_sign_on import FlowCookies, IssuerClient, SingleSignOn

_MOST_KEPT = 200  # clients with what they have read of their issuers


@dataclass(slots=True)
class SignOnDirectory:
    database: Database
    clock: Clock
    own: SingleSignOn | None  # the deployment's
    make: Callable[[IssuerClient], SingleSignOn]
    cookies: FlowCookies
    _made: dict[IssuerClient, SingleSignOn] = field(default_factory=dict)

    def choose(self, invitation: str, tenant: str) -> str:
        """The tenant whose connection a sign-in uses: that of the invitation, or of a name, an id or an
        e-mail address. Empty for the deployment's."""
        with self.database.read() as session:
            if invitation:
                member = invitations.member_of(session, self.clock, invitation)
                tenant = member.tenant_id
            return sign_on_connections.tenant_of(session, tenant) or "" if tenant else ""

    def started_with(self, cookie: str) -> str:
        """The tenant whose connection a sign-in was started with. Unauthenticated without a cookie of
        ours."""
        return str(self.cookies.read(cookie)["o"])

    def of(self, connection: str) -> SingleSignOn:
        """NotFound if there is none, such as when it was removed meanwhile."""
        if not connection:
            if self.own is None:
                raise NotFound(
                    "Single sign-on is not configured.", next_step="Sign in with a password."
                )
            return self.own
        with self.database.read() as session:
            row = sign_on_connections.of_tenant(session, connection)
        if row is None:
            raise NotFound(
                "The organisation has no single sign-on of its own.",
                next_step="Sign in with a password.",
            )
        secret = check_opened(row.client_secret, "The client secret of single sign-on")
        client = IssuerClient(row.issuer, row.client_id, secret, row.tenant_id)
        if client not in self._made:
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            self._made[client] = self.make(client)
        return self._made[client]

    def tested(self, connection: str) -> None:
        with self.database.transaction() as session:
            sign_on_connections.mark_tested(session, self.clock, connection)


def check_issuer(url: str, networks: Sequence[str]) -> None:
    """BadRequest for an issuer that could never be reached: a tenant's is public, or in `networks`."""
    try:
        check_address(url)
        check_public(url, networks)
    except BadRequest as error:
        raise BadRequest(
            f"The issuer {url[:80]!r} cannot be reached from here.",
            next_step="Give the https URL of a public issuer, as the provider shows it.",
            param="issuer",
        ) from error
