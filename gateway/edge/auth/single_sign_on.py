"""What signing in at another issuer needs: `gateway.edge.auth.open_id_connect` does it.

The packages that it uses take half a second to import, and most installations have no issuer.
"""

import base64
import hashlib
import hmac
import json
from dataclasses import dataclass
from typing import Any, Protocol

from core.clock import Clock
from core.errors import Unauthenticated
from core.settings import Settings
from core.tenants.sign_on import ExternalIdentity

SIGN_IN_TIMEOUT_S = 600  # seconds that a person may take at the issuer


@dataclass(frozen=True, slots=True)
class IssuerClient:
    """We, at an issuer. `tenant_id` is whose issuer it is; empty: the deployment's."""

    issuer: str
    client_id: str
    client_secret: str
    tenant_id: str = ""

    @classmethod
    def of(cls, settings: Settings) -> "IssuerClient":
        client = (settings.oidc_client_id, settings.oidc_client_secret)
        return cls(settings.oidc_issuer.rstrip("/"), *client)


@dataclass(frozen=True, slots=True)
class SignInRequest:
    invitation: str = ""  # links the account to the invited member
    tenant: str = ""  # chooses a membership
    test: bool = False  # try the connection, and sign nobody in


@dataclass(frozen=True, slots=True)
class SignInFlow:
    url: str  # of the issuer's sign-in page
    cookie: str


class FlowCookies:
    """Signed: what a sign-in was started with, so that any worker can finish it."""

    def __init__(self, clock: Clock, signing_secret: str) -> None:
        self._clock = clock
        self._key = hashlib.sha256(f"single sign-on:{signing_secret}".encode()).digest()

    def write(self, flow: dict[str, Any]) -> str:
        expires_at = int(self._clock.now().timestamp()) + SIGN_IN_TIMEOUT_S
        body = base64.urlsafe_b64encode(json.dumps(flow | {"e": expires_at}).encode()).decode()
        return f"{body}.{self._signature(body)}"

    def read(self, cookie: str) -> dict[str, Any]:
        body, _, signature = cookie.partition(".")
        if not hmac.compare_digest(
            self._signature(body).encode(), signature.encode("utf-8", "replace")
        ):
            raise refused("its cookie is missing")
        flow: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body))
        if flow["e"] < self._clock.now().timestamp():
            raise refused("it took too long")
        return flow

    def _signature(self, body: str) -> str:
        return hmac.new(self._key, body.encode("utf-8", "replace"), "sha256").hexdigest()


def refused(reason: str) -> Unauthenticated:
    return Unauthenticated(
        f"The sign-in was refused: {reason}.", next_step="Sign in again.", code="sso_refused"
    )


class SingleSignOn(Protocol):
    """Its methods block; call them in a thread."""

    def begin(self, redirect_uri: str, asked: SignInRequest = SignInRequest()) -> SignInFlow: ...

    def finish(self, redirect_uri: str, state: str, code: str, cookie: str) -> ExternalIdentity:
        """Raises Unauthenticated if the sign-in is invalid, Unavailable if the issuer is down."""
