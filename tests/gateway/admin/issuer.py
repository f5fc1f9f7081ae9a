"""A small OpenID Connect issuer on a free port, for one test: it signs in whom it is told to."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

CLIENT, SECRET = "tollhouse", "a client's secret"


def generate_key() -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": "one", "use": "sig"}, auto_kid=False)


class Issuer:
    def __init__(self) -> None:
        self.url = ""
        self.key = generate_key()
        self.published: list[RSAKey] = []  # instead of the key that signs
        self.claims: dict[str, Any] = {"email": "ann@acme.example", "email_verified": True}
        self.subject = "subject-1"
        self.wrong: dict[str, Any] = {}  # claims that the next token gets wrong
        self.described: dict[str, Any] = {}  # what the description gets wrong
        self._codes: dict[str, dict[str, str]] = {}

    def authorize(self, query: dict[str, str]) -> str:
        code = f"code-{len(self._codes)}"
        self._codes[code] = query
        return query["redirect_uri"] + "?" + urlencode({"code": code, "state": query["state"]})

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        asked = self._codes.pop(form.get("code", ""), None)
        basic = base64.b64encode(f"{CLIENT}:{SECRET.replace(' ', '+')}".encode()).decode()
        challenge = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
        encoded = base64.urlsafe_b64encode(challenge).decode().rstrip("=")
        known = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        if known not in (f"{CLIENT}:{SECRET}", base64.b64decode(basic).decode()):
            return 401, {"error": "invalid_client"}
        if asked is None or asked["code_challenge"] != encoded:
            return 400, {"error": "invalid_grant"}
        now = int(time.time())
        claims = {
            "iss": self.url,
            "aud": CLIENT,
            "sub": self.subject,
            "iat": now,
            "exp": now + 300,
            "nonce": asked["nonce"],
        } | self.claims
        claims |= self.wrong
        signed = jwt.encode({"alg": "RS256", "kid": "one"}, claims, self.key)
        return 200, {"access_token": "unused", "token_type": "Bearer", "id_token": signed}

    def description(self) -> dict[str, Any]:
        return {
            "issuer": self.url,
            "authorization_endpoint": f"{self.url}/authorize",
            "token_endpoint": f"{self.url}/token",
            "jwks_uri": f"{self.url}/keys",
        } | self.described


@contextmanager
def running() -> Iterator[Issuer]:
    issuer = Issuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            if parts.path == "/authorize":
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.send_response(302)
                self.send_header("location", issuer.authorize(query))
                self.end_headers()
            elif parts.path == "/keys":
                self._json(200, KeySet(issuer.published or [issuer.key]).as_dict(private=False))  # type: ignore[arg-type]
            else:
                self._json(200, issuer.description())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self._json(*issuer.token(form, self.headers.get("authorization", "")))

        def _json(self, status: int, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield issuer
    server.shutdown()
    thread.join(10)
    server.server_close()
