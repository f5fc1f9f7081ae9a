"""Streams of AWS: binary frames with checksums, read by botocore's own code."""

from typing import Any

import orjson

from core.extras import imports_of
from gateway.engines.server_events import loads

with imports_of("aws", "A model on Amazon Bedrock"):
    from botocore.eventstream import EventStreamBuffer, ParserError

_EXCEPTIONS = ("exception", "error")


class AwsFrames:
    """Each frame as a JSON object whose only field is the event's name."""

    def __init__(self) -> None:
        self._buffer = EventStreamBuffer()

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer.add_data(data)
        try:
            return [_event(frame) for frame in self._buffer]
        except ParserError as error:
            raise ValueError(f"a frame of its stream is damaged ({error})") from None


def _event(frame: Any) -> bytes:
    headers = frame.headers
    kind = headers.get(":message-type")
    if kind in _EXCEPTIONS:
        name = headers.get(":exception-type") or headers.get(":error-code") or "exception"
        given = frame.payload or orjson.dumps({"message": str(headers.get(":error-message") or "")})
    else:
        name, given = headers.get(":event-type") or "", frame.payload
    return orjson.dumps({str(name): loads(given)})
