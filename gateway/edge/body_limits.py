"""Limits on the body of every request, enforced by the server before any route sees it: bytes, and
the time in which they arrive."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from core.errors import TollhouseError
from core.ids import REQUEST, new_id
from gateway.edge.api_errors import anthropic_error, error_object, is_of_messages
from gateway.request.exchange import BODY_TIMEOUT_S, body_too_slow, too_large

LINGER_S = 2.0  # for which a refused client may read the answer, while what it sends is discarded
# Bytes per second below which an upload is refused, once the time of other bodies has passed.
UPLOAD_RATE = 16_384
# Beyond the limit of a route that refuses large bodies itself, in the format of its API.
_SLACK = 2**20
_REASONS = {408: b"Request Timeout", 413: b"Content Too Large"}


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Bytes per path; `own` are paths whose handlers refuse a large body themselves."""

    default: int
    uploads: Mapping[bytes, int] = field(default_factory=dict)
    own: frozenset[bytes] = frozenset()
    _known: dict[bytes, "BodyLimit"] = field(default_factory=dict)  # of the `own`

    def of(self, path: bytes) -> "BodyLimit":
        known = self._known.get(path)
        if known is None:
            known = self._of(path)
            if path in self.own:
                self._known[path] = known
        return known

    def _of(self, path: bytes) -> "BodyLimit":
        upload = self.uploads.get(path.rstrip(b"/"))
        if upload is not None:
            return BodyLimit(upload, UPLOAD_RATE)
        anthropic = is_of_messages(path.decode("latin-1"))
        slack = _SLACK if path in self.own else 0
        return BodyLimit(self.default, slack=slack, anthropic=anthropic)


@dataclass(frozen=True, slots=True)
class BodyLimit:
    most: int  # bytes
    least_rate: int = 0  # bytes per second; 0: the whole body arrives within BODY_TIMEOUT_S
    slack: int = 0
    anthropic: bool = False  # the format of its errors

    def refuses_length(self, length: bytes) -> bool:
        return (
            not self.slack and (length.isascii() and length.isdigit()) and int(length) > self.most
        )

    def refuses(self, received: int) -> bool:
        return received > self.most + self.slack

    def is_late(self, received: int, seconds: float) -> bool:
        return received < max(1, self.least_rate * seconds) if self.least_rate else True

    def too_large(self) -> bytes:
        return self._answer(too_large(self.most))

    def too_slow(self) -> bytes:
        return self._answer(body_too_slow(BODY_TIMEOUT_S))

    def _answer(self, error: TollhouseError) -> bytes:
        request_id = new_id(REQUEST)
        shown = anthropic_error(error, request_id) if self.anthropic else error_object(error)
        return _response(error, request_id, orjson.dumps(shown))


def _response(error: TollhouseError, request_id: str, body: bytes) -> bytes:
    """A whole response, which ends the connection."""
    status = int(error.status)
    head = b"HTTP/1.1 %d %s\r\nconnection: close\r\ncontent-type: application/json\r\n"
    ids = b"x-request-id: %b\r\nrequest-id: %b\r\n" % (request_id.encode(), request_id.encode())
    length = b"content-length: %d\r\n\r\n" % len(body)
    return head % (status, _REASONS[status]) + ids + length + body
