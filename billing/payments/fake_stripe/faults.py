"""Injected faults between a caller and the fake server, planned or random with a seed."""

import random
import re
import threading
from dataclasses import dataclass, field
from enum import StrEnum


class Fault(StrEnum):
    LOST = "lost"  # the connection breaks before the call is executed
    TIMEOUT_AFTER = "timeout_after"  # the call is executed, but the response is lost
    LIMITED = "429"
    BROKEN = "500"  # not executed; the idempotency key keeps this response
    BROKEN_AFTER = "500_after"  # executed; the idempotency key keeps this response
    BUSY = "409"  # another request with the key is in progress


@dataclass
class Faults:
    """`plan("POST /v1/invoices$", Fault.LIMITED)` fails the next matching call; `rate` is the
    probability that any call fails.
    """

    rate: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seen: list[tuple[str, Fault]] = field(default_factory=list)
    _planned: list[tuple[re.Pattern[str], Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, pattern: str, *faults: Fault) -> None:
        with self._lock:
            self._planned += [(re.compile(pattern), fault) for fault in faults]

    def next_fault(self, call: str) -> Fault | None:
        """`call` is like "POST /v1/invoices"."""
        with self._lock:
            for index, (pattern, fault) in enumerate(self._planned):
                if pattern.search(call):
                    del self._planned[index]
                    self.seen.append((call, fault))
                    return fault
            if self.rate and self.rng.random() < self.rate:
                fault = self.rng.choice(list(Fault))
                self.seen.append((call, fault))
                return fault
            return None
