"""Single sign-on by OpenID Connect: code flow with PKCE by authlib, ID token verified by joserfc.

The state, nonce and verifier of a sign-in are kept in a signed cookie, so any worker can finish a
sign-in that another worker began.
"""

import hashlib
import secrets
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests
from authlib.common.errors import AuthlibBaseError
from authlib.integrations.requests_client import OAuth2Session
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from core.clock import Clock
from core.errors import SettingError, Unavailable
from core.tenants.sign_on import ExternalIdentity
from gateway.edge.auth.issuer_http import limited
from gateway.edge.auth.single_sign_on import (
    FlowCookies,
    IssuerClient,
    SignInFlow,
    SignInRequest,
    refused,
)

TIMEOUT_S = 5.0
_GOOGLE = "https://accounts.google.com"
_METADATA_TTL_S = 3_600.0
_FAILURE_TTL_S = 10.0  # for how long an issuer that did not answer is not asked again
_ALGORITHMS = [
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "ES256",
    "ES384",
    "EdDSA",
]  # never "none", no HMAC


class OpenIdConnect:
    """Implements `SingleSignOn`."""

    def __init__(
        self,
        own: IssuerClient,
        clock: Clock,
        signing_secret: str,
        *,
        timeout_s: float = TIMEOUT_S,
        networks: Sequence[str] = (),
    ) -> None:
        """`timeout_s` is the limit of a whole exchange with the issuer. That of a tenant is reached at
        public addresses and in `networks` alone."""
        self._issuer = own.issuer
        self._client_id = own.client_id
        self._client_secret = own.client_secret
        self._tenant_id = own.tenant_id
        self._networks = networks if own.tenant_id else None
        self._clock = clock
        self._timeout_s = timeout_s
        self._cookies = FlowCookies(clock, signing_secret)
        self._lock = threading.Lock()
        self._metadata: dict[str, Any] = {}
        self._keys: KeySet | None = None
        self._fetched_at = self._failed_at = float("-inf")
        if self._issuer and not self._client_id:
            raise SettingError(
                "TOLLHOUSE_OIDC_ISSUER is set, but TOLLHOUSE_OIDC_CLIENT_ID is not.",
                next_step="Set both, or neither.",
            )

    def begin(self, redirect_uri: str, asked: SignInRequest = SignInRequest()) -> SignInFlow:
        verifier, nonce = secrets.token_urlsafe(48), secrets.token_urlsafe(24)
        with self._client(redirect_uri) as client:
            url, state = client.create_authorization_url(
                self._endpoint("authorization_endpoint"), code_verifier=verifier, nonce=nonce
            )
        flow = {"s": state, "n": nonce, "v": verifier, "o": self._tenant_id}
        flow |= {"i": asked.invitation, "t": asked.tenant, "c": asked.test}
        return SignInFlow(url, self._cookies.write(flow))

    def finish(self, redirect_uri: str, state: str, code: str, cookie: str) -> ExternalIdentity:
        """Raises Unauthenticated if the sign-in is invalid, Unavailable if the issuer is down."""
        flow = self._cookies.read(cookie)
        if flow["o"] != self._tenant_id:
            raise refused("it was started with another issuer")
        if not secrets.compare_digest(flow["s"].encode(), state.encode()):
            raise refused("it was not started in this browser")
        endpoint = self._endpoint("token_endpoint")
        try:
            with (
                self._client(redirect_uri) as client,
                limited(client, self._timeout_s, self._networks),
            ):
                token = client.fetch_token(
                    endpoint,
                    code=code,
                    code_verifier=flow["v"],
                    timeout=self._timeout_s,
                    allow_redirects=False,
                )
        except AuthlibBaseError:
            raise refused("the issuer did not accept the code") from None
        except (requests.RequestException, ValueError):
            raise _issuer_down() from None
        return self._identity(str(token.get("id_token", "")), flow)

    def _identity(self, id_token: str, flow: dict[str, Any]) -> ExternalIdentity:
        try:
            claims = self._verified(id_token, flow["n"])
        except (JoseError, ValueError) as error:
            raise refused(f"the issuer's ID token is invalid ({type(error).__name__})") from None
        subject = f"{self._issuer}#{claims['sub']}"
        if len(subject) > 255:
            subject = hashlib.sha256(subject.encode()).hexdigest()
        return ExternalIdentity(
            subject,
            self._email(claims),
            flow["i"],
            flow["t"],
            name=str(claims.get("name", ""))[:200],
            connection=self._tenant_id,
            test=bool(flow["c"]),
        )

    def _email(self, claims: dict[str, Any]) -> str:
        """Empty if it is not verified. A tenant's own issuer may say nothing of that, as Entra does; one
        that serves everybody, as Google does, names the organisation of a managed account."""
        email = str(claims.get("email", ""))
        if self._issuer == _GOOGLE and self._tenant_id:
            hosted = str(claims.get("hd", ""))
            return email if hosted and hosted == email.rpartition("@")[2] else ""
        unsaid = True if self._tenant_id else None
        return email if claims.get("email_verified", unsaid) is True else ""

    def _verified(self, id_token: str, nonce: str) -> dict[str, Any]:
        try:
            token = jwt.decode(id_token, self._key_set(), algorithms=_ALGORITHMS)
        except (JoseError, ValueError):
            # The issuer may have rotated its keys: fetch them once more.
            token = jwt.decode(id_token, self._key_set(fresh=True), algorithms=_ALGORITHMS)
        jwt.JWTClaimsRegistry(
            now=int(self._clock.now().timestamp()),
            leeway=60,
            iss={"essential": True, "value": self._metadata["issuer"]},
            aud={"essential": True, "value": self._client_id},
            exp={"essential": True},
            sub={"essential": True},
            nonce={"essential": True, "value": nonce},
        ).validate(token.claims)
        return dict(token.claims)

    def _client(self, redirect_uri: str) -> Any:
        return OAuth2Session(
            self._client_id,
            self._client_secret or None,
            scope="openid email profile" if self._tenant_id else "openid email",
            redirect_uri=redirect_uri,
            code_challenge_method="S256",
            token_endpoint_auth_method="client_secret_basic" if self._client_secret else "none",
        )

    def _endpoint(self, name: str) -> str:
        self._discover()
        return str(self._metadata[name])

    def _key_set(self, *, fresh: bool = False) -> KeySet:
        self._discover()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise _issuer_down()
        try:
            if self._keys is None or fresh:
                found = _fetch_json(self._metadata["jwks_uri"], self._timeout_s, self._networks)
                self._keys = KeySet.import_key_set(found)  # type: ignore[arg-type]
            return self._keys
        finally:
            self._lock.release()

    def _discover(self) -> None:
        """Fetch the issuer's discovery document, at most once an hour. One caller fetches it, and the
        others wait for that; a failure holds for a few seconds, or, once there was a document, that
        stays in use until the issuer answers again."""
        if self._clock.monotonic() - self._fetched_at < _METADATA_TTL_S:
            return
        if not self._lock.acquire(timeout=self._timeout_s):
            raise _issuer_down()
        try:
            now = self._clock.monotonic()
            if now - self._fetched_at < _METADATA_TTL_S:
                return
            if now - self._failed_at >= _FAILURE_TTL_S:
                try:
                    self._fetch_metadata()
                    return
                except Unavailable:
                    self._failed_at = self._clock.monotonic()
                    if not self._metadata:
                        raise
            if not self._metadata:
                raise _issuer_down()
        finally:
            self._lock.release()

    def _fetch_metadata(self) -> None:
        url = f"{self._issuer}/.well-known/openid-configuration"
        document = _fetch_json(url, self._timeout_s, self._networks)
        names = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        secure = urlsplit(self._issuer).scheme == "https"
        for name in names:
            scheme = urlsplit(str(document.get(name, ""))).scheme
            if scheme != "https" and (secure or scheme != "http"):
                raise _issuer_down()
        if str(document.get("issuer", "")).rstrip("/") != self._issuer:
            raise _issuer_down()
        self._metadata, self._keys = document, None
        self._fetched_at = self._clock.monotonic()


def _fetch_json(url: str, timeout_s: float, networks: Sequence[str] | None) -> dict[str, Any]:
    try:
        with requests.Session() as session, limited(session, timeout_s, networks):
            answer = session.get(url, timeout=timeout_s, allow_redirects=False)
        document = answer.json() if answer.status_code == 200 else None
    except (requests.RequestException, ValueError):
        document = None
    if not isinstance(document, dict):
        raise _issuer_down()
    return document


def _issuer_down() -> Unavailable:
    return Unavailable(
        "The single sign-on issuer does not answer, or not as OpenID Connect requires.",
        next_step="Sign in with a password, or try again; admins: check the issuer's URL.",
        code="sso_unavailable",
    )
