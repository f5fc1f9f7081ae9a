"""Access tokens of Google's cloud, made and renewed by google-auth, an extra."""

import asyncio
import time
from collections.abc import Mapping
from datetime import UTC
from typing import Any

from core.clock import SystemClock
from core.extras import imports_of

_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
_EARLY_S = 300.0  # a token is renewed so long before it ends
_LASTS_S = 3_600.0  # where the library does not say it


class GoogleTokens:
    """A fixed token, or those of a service account's file, or of the machine's own account."""

    def __init__(self, fixed: str = "", file: str = "") -> None:
        self._fixed = fixed
        self._file = file
        self._credentials: Any = None
        self._until = 0.0  # monotonic time
        self._lock = asyncio.Lock()

    async def headers(self) -> Mapping[str, str]:
        if self._fixed:
            return {"authorization": f"Bearer {self._fixed}"}
        if time.monotonic() >= self._until:
            async with self._lock:
                if time.monotonic() >= self._until:
                    await asyncio.to_thread(self._renew)
        return {"authorization": f"Bearer {self._credentials.token}"}

    def _renew(self) -> None:
        with imports_of("vertex", "A model on Vertex AI"):
            import google.auth
            from google.auth.transport.requests import Request
        if self._credentials is None and self._file:
            load: Any = google.auth.load_credentials_from_file  # it has no types
            self._credentials = load(self._file, scopes=[_SCOPE])[0]
        elif self._credentials is None:
            self._credentials = google.auth.default(scopes=[_SCOPE])[0]
        self._credentials.refresh(Request())
        left = _LASTS_S
        if (expiry := getattr(self._credentials, "expiry", None)) is not None:
            left = (expiry.replace(tzinfo=UTC) - SystemClock().now()).total_seconds()
        self._until = time.monotonic() + max(1.0, left - _EARLY_S)
