"""Records every verdict in the spool: plain `allow` verdicts in batches, all others at once.

A killed process loses at most the `allow` verdicts of the last batch; any other verdict is in the
spool before the request continues.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence

from core.clock import Clock
from core.events import ModerationEvent
from core.tenants.keys import Principal
from moderation.records import event_of, fingerprint, fingerprint_begun, fingerprint_ended
from moderation.verdict import ALLOW, Verdict

BATCH_S = 0.25
MAX_BATCH = 500


def record_secret(operator_token: str) -> bytes:
    """The HMAC key of the text fingerprints, stable as long as the operator token is."""
    return hmac.digest(operator_token.encode(), b"tollhouse moderation records", "sha256")


class DecisionLog:
    def __init__(
        self,
        clock: Clock,
        secret: bytes,
        write: Callable[[Sequence[ModerationEvent]], None],
    ) -> None:
        self._clock = clock
        self._secret = secret
        self._write = write
        self._batch: list[ModerationEvent] = []
        self._timer: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> "hashlib._Hash":
        """A hash that `record` takes in place of a text, once it has read that text."""
        return fingerprint_begun(self._secret)

    def record(
        self,
        request_id: str,
        principal: Principal,
        direction: str,
        verdict: Verdict,
        text: "str | hashlib._Hash",
    ) -> None:
        secret = self._secret
        event = event_of(
            verdict,
            request_id=request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            at=self._clock.now(),
            direction=direction,
            text_sha256=(
                fingerprint(text, secret)
                if isinstance(text, str)
                else fingerprint_ended(text, secret)
            ),
        )
        if verdict.would > ALLOW or verdict.unscanned:
            self._write((event,))
            return
        self._batch.append(event)
        if len(self._batch) >= MAX_BATCH:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(BATCH_S, self.flush)

    def flush(self) -> None:
        """Write the gathered batch to the spool now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._batch = self._batch, []
        if batch:
            self._write(batch)
