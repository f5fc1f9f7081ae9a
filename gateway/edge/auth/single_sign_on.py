"""What signing in at another issuer needs: `gateway.edge.auth.open_id_connect` does it.

The packages that it uses take half a second to import, and most installations have no issuer.
"""

from dataclasses import dataclass
from typing import Protocol

from core.tenants.sign_on import ExternalIdentity

SIGN_IN_TIMEOUT_S = 600  # seconds that a person may take at the issuer


@dataclass(frozen=True, slots=True)
class SignInFlow:
    url: str  # of the issuer's sign-in page
    cookie: str


class SingleSignOn(Protocol):
    """Its methods block; call them in a thread."""

    def begin(self, redirect_uri: str, invitation: str = "", tenant: str = "") -> SignInFlow:
        """`invitation` links the account to the invited member; `tenant` chooses a membership."""

    def finish(self, redirect_uri: str, state: str, code: str, cookie: str) -> ExternalIdentity:
        """Raises Unauthenticated if the sign-in is invalid, Unavailable if the issuer is down."""
