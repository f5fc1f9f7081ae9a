"""Adapters with which engines hung or died.

An engine that hangs while it reads an adapter hangs because of it. Of an engine that dies with several
requests in it, each may be the cause: their adapters are suspected, and only one that is there again
when another engine dies is taken for it.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from core.clock import Clock
from gateway.catalog.catalog import NamedAdapter

log = logging.getLogger("tollhouse.routing")
STRIKES = 2
WINDOW_S = 3600.0
_MOST = 10_000  # adapters that are remembered


class Suspects:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # When each engine process died that had begun with a request for the adapter, by digest.
        self._deaths: OrderedDict[str, dict[str, float]] = OrderedDict()
        # Called with an adapter that must not be used any more, and why.
        self.on_quarantine: Callable[[NamedAdapter, str], None] | None = None

    def hung(self, adapter: NamedAdapter) -> None:
        """An engine was lost while it read the adapter's files."""
        self._quarantine(adapter, "an engine stopped while it read the adapter")

    def lost(self, adapter: NamedAdapter, process: str) -> None:
        """An engine process was lost that had begun with a request for the adapter."""
        now = self._clock.monotonic()
        deaths = self._deaths.pop(adapter.digest, {})
        self._deaths[adapter.digest] = deaths = {
            each: at for each, at in deaths.items() if at > now - WINDOW_S
        }
        deaths[process] = now
        if len(self._deaths) > _MOST:
            self._deaths.popitem(last=False)
        if len(deaths) >= STRIKES:
            del self._deaths[adapter.digest]
            self._quarantine(adapter, f"{STRIKES} engines stopped while they used the adapter")

    def _quarantine(self, adapter: NamedAdapter, reason: str) -> None:
        log.error(
            "the adapter %s (%s) is quarantined: %s", adapter.name, adapter.digest[:12], reason
        )
        if self.on_quarantine is not None:
            self.on_quarantine(adapter, reason)
