"""What still lies in the stream that the settings name."""

import logging
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta

from core.clock import Clock
from core.settings import Settings
from gateway.metering.streams.base import StreamDown, age_s, wait_until_stored
from gateway.metering.streams.opening import open_stream

log = logging.getLogger("tollhouse.stream")
_TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class StreamState:
    messages: int = 0  # not in the database yet
    age_s: float = 0.0  # of the oldest
    problem: str = ""  # why the stream cannot be read


def stream_state(settings: Settings, clock: Clock) -> StreamState:
    """An empty state without a stream. SettingError for a stream that would lose messages."""
    if not settings.stream_url:
        return StreamState()
    with closing(open_stream(settings.stream_url, timeout_s=_TIMEOUT_S)) as stream:
        try:
            lag = stream.lag()
        except StreamDown as error:
            return StreamState(problem=str(error))
    return StreamState(lag.messages, age_s(lag.oldest, clock))


def wait_for_stream(settings: Settings, timeout_s: float) -> None:
    """Wait briefly until what the stream holds now is in the database, if there is a stream."""
    if not settings.stream_url:
        return
    with closing(open_stream(settings.stream_url, timeout_s=_TIMEOUT_S)) as stream:
        try:
            wait_until_stored(stream, timeout_s)
        except StreamDown as error:
            log.warning("%s", error)


@dataclass(frozen=True, slots=True)
class StreamTransit:
    """Billing's port UsageInTransit: an audit asks it for usage that is late."""

    settings: Settings
    clock: Clock

    def late(self, age: timedelta) -> int:
        state = stream_state(self.settings, self.clock)
        if state.problem:
            raise StreamDown(state.problem)
        return state.messages if state.age_s > age.total_seconds() else 0
