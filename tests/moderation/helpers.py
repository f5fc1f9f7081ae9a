"""A classifier whose scores are plain to see, and small helpers for the room's tests."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from moderation.categories import HEADS
from moderation.guard import StreamGuard
from moderation.policy import Policy
from moderation.screener import Screener
from moderation.verdict import Verdict


class WordClassifier:
    """Scores 0.99 for a head when one of its words stands in the text, else 0.01."""

    version = "words"

    def __init__(self, **words: str) -> None:
        self.words = {
            name.replace("_", "-") if name == "self_harm" else name: word
            for name, word in words.items()
        }
        self.calls = 0

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.calls += 1
        rows = [
            [0.99 if self.words.get(head, "\0") in text.lower() else 0.01 for head in HEADS]
            for text in texts
        ]
        return np.array(rows, dtype=np.float32)


class BrokenClassifier:
    version = "broken"

    def score(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise RuntimeError(f"cannot score {texts[0]}")


def stream(
    policy: Policy, chunks: Sequence[str], screener: Screener | None = None, before: str = ""
) -> tuple[str, Verdict, bool]:
    """Run chunks through a guard; return what left, the verdict, and whether it was blocked."""
    guard = StreamGuard(policy, screener or Screener(), lambda _: before)
    left, blocked = "", False
    for chunk in chunks:
        release = guard.feed(0, chunk)
        left, blocked = left + release.text, release.blocked
        if blocked:
            break
    if not blocked:
        release = guard.finish(0)
        left, blocked = left + release.text, release.blocked
    return left, guard.verdict(), blocked


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Cut a text at the given places, taken modulo its length."""
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(edges)]
