"""The wire format of the protocol: a kind byte, a sequence number, and a record in msgpack.

The sequence number counts the messages that the engine has sent to one gateway, so that the
gateway detects a gap.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from engine.errors import EngineError
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    KvEvent,
    Receipt,
    Refusal,
    StepOutput,
)

VERSION = 1


# From a gateway.


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a gateway, repeated when the engine asks for it. `seen` is the last
    sequence number that arrived: if the engine has sent more, messages were lost and it ends the
    gateway's requests."""

    gateway_id: str
    version: int = VERSION
    seen: int = 0
    kv_events: bool = False
    attempt: int = 0  # returned in the Welcome


@dataclass(frozen=True, slots=True)
class Generate:
    request: GenerateRequest


@dataclass(frozen=True, slots=True)
class Abort:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The gateway has stored the receipts of these requests durably."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    call: int
    path: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    call: int
    digest: str


@dataclass(frozen=True, slots=True)
class LookUp:
    call: int
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class Goodbye:
    pass


# From the engine.


@dataclass(frozen=True, slots=True)
class Welcome:
    info: EngineInfo
    stats: EngineStats
    receipts: list[Receipt]  # not acknowledged yet by this gateway
    under_way: list[str]  # this gateway's running requests; the engine has no others of it
    number: int  # the sequence number of this message
    attempt: int = 0  # of the Hello that this answers; says nothing of requests sent after it


@dataclass(frozen=True, slots=True)
class Identify:
    """The engine does not know this connection: the gateway must send a Hello."""


@dataclass(frozen=True, slots=True)
class AdapterReply:
    call: int
    state: AdapterState | None = None
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class LookUpReply:
    """The receipts of the requests that ended, and the requests that still run."""

    call: int
    receipts: list[Receipt]
    under_way: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class KvEvents:
    events: list[KvEvent]


@dataclass(frozen=True, slots=True)
class Began:
    """The next step computes these requests for the first time, or the adapter at `path` is read next.
    If the engine hangs or dies, they may be the cause."""

    request_ids: list[str]
    path: str = ""


# The kind byte is the index in this list: append only.
_KINDS: list[type] = [
    Hello,
    Generate,
    Abort,
    Acknowledge,
    LoadAdapter,
    UnloadAdapter,
    LookUp,
    Heartbeat,
    Goodbye,
    Welcome,
    Identify,
    StepOutput,
    Refusal,
    EngineStats,
    AdapterReply,
    LookUpReply,
    KvEvents,
    Began,
]
_BYTE = {kind: bytes([number]) for number, kind in enumerate(_KINDS)}
_DECODE: list[Callable[[bytes], Any]] = [msgspec.msgpack.Decoder(kind).decode for kind in _KINDS]
_ENCODER = msgspec.msgpack.Encoder()
# What msgspec raises for bytes of a stranger: also for text that is no UTF-8, and for deep nesting.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WireError(EngineError):
    """A message that is not of this protocol."""

    def __init__(self, message: str) -> None:
        super().__init__("bad_message", message)


def encode(record: Any, number: int = 0) -> bytes:
    return _BYTE[type(record)] + number.to_bytes(8, "little") + _ENCODER.encode(record)


def decode(data: bytes) -> tuple[Any, int]:
    """The record and its sequence number (0 from gateways)."""
    if len(data) < 9 or data[0] >= len(_KINDS):
        raise WireError(f"a message of {len(data)} bytes has an unknown kind or no header")
    try:
        record = _DECODE[data[0]](data[9:])
    except _UNREADABLE as error:
        raise WireError(f"a {_KINDS[data[0]].__name__} message is invalid: {error}") from error
    return record, int.from_bytes(data[1:9], "little")


def request_id_of(data: bytes) -> str | None:
    """The request id of a Generate that `decode` refused, for the Refusal to its sender."""
    if not data.startswith(_BYTE[Generate]):
        return None
    try:
        found = msgspec.msgpack.decode(data[9:])["request"]["request_id"]
    except (*_UNREADABLE, KeyError, TypeError, IndexError):
        return None
    return found if isinstance(found, str) else None
