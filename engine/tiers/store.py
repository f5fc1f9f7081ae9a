"""The tiers of one engine, the fastest first: reads and writes that never fail the caller.

A tier that raises is left out for some seconds, and bytes that prove wrong are removed: either way the
block counts as not found, so its tokens are computed. Each is said in one line of the log.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.tiers.sealing import Open, Seal
from engine.tiers.tier import Tier, owner_folder

log = logging.getLogger("tollhouse.engine")

PAUSE_S = 5.0  # that a tier is left out after it failed


@dataclass(frozen=True, slots=True)
class Note:
    """What happened in a thread, for the engine's own to count and report."""

    kind: str  # stored, removed, restored, failed or wrong
    label: str
    names: list[str]


@dataclass(slots=True)
class SealedTier:
    tier: Tier
    seal: Seal
    open: Open
    paused_until: float = 0.0


Owned = tuple[str, bytes]  # owner and key of a block


class TierStore:
    """`fetch` and `save` run on threads; `holds` on any."""

    def __init__(
        self, tiers: list[SealedTier], scope: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tiers = tiers
        self._scope = scope
        self._clock = clock
        self.listed = frozenset(each.tier.label for each in tiers if each.tier.listed)
        self.notes: deque[Note] = deque()

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @property
    def asks_others(self) -> bool:
        """Whether only a read shows what some tier holds."""
        return any(not each.tier.listed for each in self._usable())

    def holds(self, owned: Owned) -> bool:
        return any(each.tier.holds(self._name(owned)) for each in self._usable())

    def names(self) -> dict[str, list[str]]:
        """By tier, what it is known to hold for this model."""
        known = {each.tier.label: each.tier.names() for each in self._tiers}
        return {
            label: [name for name in names if name.split("/")[1] == self._scope]
            for label, names in known.items()
        }

    def fetch(self, wanted: list[Owned]) -> list[bytes]:
        """The data of the leading blocks that some tier holds; faster tiers get a copy."""
        found: list[bytes] = []
        while len(found) < len(wanted):
            data = self._fetch(wanted[len(found) :])
            if not data:
                break
            found += data
        return found

    def _fetch(self, wanted: list[Owned]) -> list[bytes]:
        """From the first tier that has the first block."""
        for number, each in enumerate(self._tiers):
            data = self._read(each, wanted)
            if data:
                for faster in self._tiers[:number]:
                    self._write(faster, list(zip(wanted, data, strict=False)))
                return data
        return []

    def save(self, items: list[tuple[Owned, bytes]]) -> None:
        for each in self._tiers:
            self._write(each, items)

    def close(self) -> None:
        for each in self._tiers:
            each.tier.close()

    def _usable(self) -> list[SealedTier]:
        now = self._clock()
        return [each for each in self._tiers if each.paused_until <= now]

    def _name(self, owned: Owned) -> str:
        return f"{owner_folder(owned[0])}{self._scope}/{owned[1].hex()}"

    def _read(self, each: SealedTier, wanted: list[Owned]) -> list[bytes]:
        if each.paused_until > self._clock():
            return []
        found: list[bytes] = []
        try:
            for owned, stored in zip(
                wanted, each.tier.read([self._name(owned) for owned in wanted]), strict=False
            ):
                name = self._name(owned)
                data = each.open(owned[0], name, stored)
                if data is None:
                    log.warning(
                        "tier %s: wrong bytes for block %s: computed", each.tier.label, name
                    )
                    self.notes.append(Note("wrong", each.tier.label, [name]))
                    each.tier.discard(name)
                    break
                found.append(data)
        except Exception as error:
            self._pause(each, "cannot be read", error)
        if found:
            names = [self._name(owned) for owned in wanted[: len(found)]]
            self.notes.append(Note("restored", each.tier.label, names))
        return found

    def _write(self, each: SealedTier, items: list[tuple[Owned, bytes]]) -> None:
        if each.paused_until > self._clock():
            return
        try:
            for owned, data in items:
                name = self._name(owned)
                if each.tier.holds(name):
                    continue
                gone = each.tier.write(name, each.seal(owned[0], name, data))
                self.notes.append(Note("stored", each.tier.label, [name]))
                if gone:
                    self.notes.append(Note("removed", each.tier.label, gone))
        except Exception as error:
            self._pause(each, "cannot be written", error)

    def _pause(self, each: SealedTier, what: str, error: Exception) -> None:
        each.paused_until = self._clock() + PAUSE_S
        self.notes.append(Note("failed", each.tier.label, []))
        log.warning(
            "tier %s %s (%s): left out for %g s, blocks are computed",
            each.tier.label, what, error, PAUSE_S,
        )  # fmt: skip
