"""Finds stop strings across chunk boundaries; text that may begin one is held back."""

from collections.abc import Sequence


class StopMatcher:
    """`feed` returns the text that is safe to send; after a match it returns nothing."""

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        """`included`: the stop string that ends the text is part of it."""
        self._included = included
        self._stops = [stop for stop in stops if stop]
        self._longest = max((len(stop) for stop in self._stops), default=0)
        self._held = ""
        self.matched: str | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def feed(self, text: str) -> str:
        if self.matched is not None:
            return ""
        self._held += text
        positions = [(self._held.find(stop), stop) for stop in self._stops]
        hits = [(at, -len(stop), stop) for at, stop in positions if at >= 0]
        if hits:
            at, _, self.matched = min(hits)
            end = at + len(self.matched) if self._included else at
            released, self._held = self._held[:end], ""
            return released
        keep = self._undecided()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released

    def flush(self) -> str:
        released, self._held = self._held, ""
        return released

    def _undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        held = self._held
        for length in range(min(self._longest - 1, len(held)), 0, -1):
            tail = held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
