"""Tokens of Microsoft Entra for an application, by OAuth's client credentials."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

_AUTHORITY = "https://login.microsoftonline.com"
_SCOPE = "https://cognitiveservices.azure.com/.default"
_EARLY_S = 300.0  # a token is renewed so long before it ends
_TIMEOUT_S = 20.0


class AzureTokens:
    """`options`: tenant, client_id and client_secret, and the authority where it is another cloud's."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        authority = str(options.get("authority") or _AUTHORITY).rstrip("/")
        self._url = f"{authority}/{quote(str(options.get('tenant') or ''))}/oauth2/v2.0/token"
        self._form = {
            "grant_type": "client_credentials",
            "client_id": str(options.get("client_id") or ""),
            "client_secret": str(options.get("client_secret") or ""),
            "scope": str(options.get("scope") or _SCOPE),
        }
        self._token = ""
        self._until = 0.0  # monotonic time
        self._lock = asyncio.Lock()

    async def headers(self) -> Mapping[str, str]:
        """Raises ValueError where no token is given."""
        if time.monotonic() >= self._until:
            async with self._lock:
                if time.monotonic() >= self._until:
                    await self._renew()
        return {"authorization": f"Bearer {self._token}"}

    async def _renew(self) -> None:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(self._url, data=self._form) as answer,
        ):
            given = await answer.json(content_type=None)
        if answer.status != 200 or not isinstance(given.get("access_token"), str):
            raise ValueError(f"Entra gives no token: {answer.status} {given.get('error')}")
        self._token = given["access_token"]
        self._until = time.monotonic() + max(1.0, float(given.get("expires_in") or 0) - _EARLY_S)
