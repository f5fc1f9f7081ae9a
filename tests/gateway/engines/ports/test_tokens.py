"""Tokens of Google and Entra: made once, sent, and said where there are none."""

import asyncio
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType
from typing import Any

import pytest

from core.errors import MissingExtra
from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.gemini.tokens import GoogleTokens
from gateway.engines.ports.registry import port_of
from gateway.engines.ports.shaped.azure_tokens import AzureTokens
from tests.gateway.provider_server import Provider, provider, whole


class Credentials:
    """As google-auth's: `expiry` is in UTC, without a zone."""

    token = ""
    expiry: datetime | None = None

    def __init__(self, lasts: timedelta) -> None:
        self.lasts = lasts
        self.renewals = 0

    def refresh(self, _request: object) -> None:
        self.renewals += 1
        self.token = f"token {self.renewals}"
        self.expiry = datetime.now(UTC).replace(tzinfo=None) + self.lasts


def _google(monkeypatch: pytest.MonkeyPatch, credentials: Credentials) -> None:
    auth: Any = ModuleType("google.auth")
    auth.default = lambda scopes: (credentials, "ours")
    requests: Any = ModuleType("google.auth.transport.requests")
    requests.Request = object
    transport: Any = ModuleType("google.auth.transport")
    for name, module in (("", auth), (".transport", transport), (".transport.requests", requests)):
        monkeypatch.setitem(sys.modules, f"google.auth{name}", module)
    google: Any = sys.modules.get("google") or ModuleType("google")
    monkeypatch.setattr(google, "auth", auth, raising=False)
    monkeypatch.setitem(sys.modules, "google", google)


def test_a_token_of_google_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = Credentials(timedelta(hours=1))
    _google(monkeypatch, credentials)
    tokens = GoogleTokens()

    async def ask() -> list[Any]:
        return await asyncio.gather(*[tokens.headers() for _ in range(5)])

    assert asyncio.run(ask()) == [{"authorization": "Bearer token 1"}] * 5
    assert credentials.renewals == 1


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.auth", None)
    with pytest.raises(MissingExtra, match="vertex"):
        asyncio.run(GoogleTokens().headers())


def test_a_fixed_token_needs_no_library() -> None:
    options = {"project": "p", "location": "l"}
    port = port_of(Upstream("http://x", provider="vertex", api_key="ya29", options=options))
    assert asyncio.run(port.headers("/", b"")) == {"authorization": "Bearer ya29"}


@pytest.fixture
def entra() -> Iterator[Provider]:
    with provider() as made:
        yield made


def test_a_token_of_entra_is_made_once_and_sent(entra: Provider) -> None:
    entra.said = whole({"access_token": "eyJ", "expires_in": 3600})
    options = {
        "authority": entra.url,
        "tenant": "ours",
        "client_id": "app",
        "client_secret": "s+cret",
    }
    port = port_of(Upstream("http://x", provider="azure", options=options))

    async def ask() -> list[Any]:
        return await asyncio.gather(*[port.headers("/", b"") for _ in range(5)])

    assert asyncio.run(ask()) == [{"authorization": "Bearer eyJ"}] * 5
    assert [each.path for each in entra.asked] == ["/ours/oauth2/v2.0/token"]
    assert b"client_secret=s%2Bcret" in entra.last.raw


def test_no_token_of_entra_is_said(entra: Provider) -> None:
    entra.said = whole({"error": "invalid_client"}, 401)
    with pytest.raises(ValueError, match="invalid_client"):
        asyncio.run(AzureTokens({"authority": entra.url}).headers())
