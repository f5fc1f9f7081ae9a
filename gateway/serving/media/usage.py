"""What an upstream reports of an audio or image request: in a JSON answer, or in the events of a
stream. Without a report, what was asked for counts."""

from dataclasses import dataclass, field
from math import ceil, isfinite
from typing import Any

import orjson

from core.events import CountedBy, UsageKind
from engine.protocol import FinishReason
from gateway.engines.server_events import EventReader, data_of, loads
from gateway.request.receipts import UpstreamReceipt
from gateway.serving.media.request import MediaRequest

_LARGEST = 2**31 - 1
_MOST_S = 24 * 3600
_LONGEST_EVENT = 64 << 20  # bytes of one event of a stream: an image in base64


@dataclass(slots=True)
class MediaUsage:
    """Read it with `answer` or `feed`; then `units` and `receipt` are what to bill."""

    request: MediaRequest
    reported_s: int = 0
    images: int = 0
    given: int = 0  # tokens
    cached: int = 0
    made: int = 0
    _events: EventReader = field(default_factory=lambda: EventReader(_LONGEST_EVENT))

    def answer(self, body: bytes) -> None:
        """A whole JSON answer; anything else reports nothing."""
        try:
            found = orjson.loads(body)
        except ValueError:
            return
        if not isinstance(found, dict):
            return
        self._report(found)
        data = found.get("data")
        self.images = len(data) if isinstance(data, list) else 0

    def feed(self, data: bytes) -> None:
        """A piece of a stream of events."""
        for lines in self._events.feed(data):
            try:
                event = loads(data_of(lines))
            except ValueError:
                continue
            if isinstance(event, dict):
                self._report(event)
                self.images += str(event.get("type", "")).endswith(".completed")

    @property
    def units(self) -> int:
        """Seconds, characters or images, of an answer that was delivered."""
        if self.request.endpoint.kind is UsageKind.IMAGE:
            return min(self.images, self.request.units)
        return self.reported_s or self.request.units

    @property
    def counted_by(self) -> CountedBy:
        if self.reported_s or self.given or self.made:
            return CountedBy.UPSTREAM
        return CountedBy.GATEWAY if self.request.measured else CountedBy.ESTIMATE

    def receipt(self, request_id: str, namespace: str) -> UpstreamReceipt:
        return UpstreamReceipt(
            request_id=request_id,
            namespace=namespace,
            adapter=None,
            prompt=self.given,
            cached=self.cached,
            computed=self.given - self.cached,
            unprocessed=0,
            generated=self.made,
            delivered=self.made,
            recomputed=0,
            discarded=0,
            finish_reason=FinishReason.STOP,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=0.0,
            counted_by=self.counted_by,
        )

    def _report(self, found: dict[str, Any]) -> None:
        usage = found.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        if self.request.endpoint.kind is UsageKind.AUDIO:
            # Whisper servers state the length of the audio in verbose_json alone, some as text.
            self.reported_s = _seconds(usage.get("seconds", found.get("duration"))) or (
                self.reported_s
            )
        self.given = _tokens(usage, "input_tokens", "prompt_tokens") or self.given
        self.made = _tokens(usage, "output_tokens", "completion_tokens") or self.made
        details = usage.get("input_tokens_details") or usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached = min(self.given, _tokens(details, "cached_tokens"))


def _seconds(value: Any) -> int:
    """A started second counts; 0 for what is not a plausible length."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return 0
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    if not isfinite(value) or not 0 < value <= _MOST_S:
        return 0
    return ceil(value)


def _tokens(holder: dict[str, Any], *names: str) -> int:
    for name in names:
        value = holder.get(name)
        if isinstance(value, int) and value is not True and 0 < value <= _LARGEST:
            return value
    return 0
