"""Log probabilities of an upstream stand for the characters that their bytes are, wherever they come."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.answers.logprobs import LogprobQueue


class Cutter:
    """A guard that removes given places and the word `bad`."""

    def __init__(self, *cuts: tuple[int, int]) -> None:
        self.cuts: Sequence[tuple[int, int]] = cuts

    def clean(self, text: str) -> str | None:
        return None if text == "bad" else text


def entry(token: str, raw: list[int] | None = None, **fields: Any) -> dict[str, Any]:
    return {"token": token, "logprob": -1.0, "bytes": raw, **fields}


def listed(*entries: Any) -> dict[str, Any]:
    return {"content": list(entries)}


def kept(queue: LogprobQueue, released: float = 1e9) -> list[str]:
    return [each["token"] for each in queue.take(released)[1]]


def test_only_the_tokens_of_removed_characters_are_dropped() -> None:
    queue = LogprobQueue(Cutter((2, 4), (6, 7)))
    for at in range(8):
        queue.add_upstream(listed(entry(str(at))), str(at))
    assert kept(queue) == ["0", "1", "4", "5", "7"]
    neighbours = LogprobQueue(Cutter((2, 4), (4, 5)))
    for at in range(6):
        neighbours.add_upstream(listed(entry(str(at))), str(at))
    assert kept(neighbours) == ["0", "1", "5"]


def test_text_without_entries_counts_for_the_places_of_later_ones() -> None:
    """A stream whose first chunks have none, and one that stops having them."""
    queue = LogprobQueue(Cutter((6, 7)))
    queue.add_upstream(None, "Hello ")
    for character in "abc":
        queue.add_upstream(listed(entry(character)), character)
    queue.add_upstream(None, " and ")
    assert kept(queue, 8) == ["b"], "the first is cut, the last not released yet"
    queue.add_upstream(listed(entry("d")), "d")
    assert kept(queue) == ["c", "d"]


def test_tokens_may_come_before_their_text() -> None:
    euro = list("€".encode())
    queue = LogprobQueue(Cutter((1, 2)))
    queue.add_upstream(listed(entry("a")), "a")
    queue.add_upstream(listed(entry("\\xe2", euro[:1])), "")
    queue.add_upstream(listed(entry("\\x82\\xac", euro[1:])), "€")
    queue.add_upstream(listed(entry("b")), "b")
    assert kept(queue) == ["a", "b"], "both parts of the removed character are dropped"
    shown = LogprobQueue(Cutter())
    shown.add_upstream(listed(entry("\\xe2", euro[:1]), entry("\\x82\\xac", euro[1:])), "€")
    assert len(kept(shown)) == 2


def test_a_character_after_the_removed_one_is_kept() -> None:
    """Only a token that begins with a continuation byte reaches into the character before it."""
    queue = LogprobQueue(Cutter((0, 1)))
    for character in "éa":
        queue.add_upstream(listed(entry(character, list(character.encode()))), character)
    assert kept(queue) == ["a"]


@pytest.mark.parametrize(("raw", "valid"), [([0], True), ([255], True), ([256], False)])
def test_bytes_are_those_of_a_byte(raw: list[int], valid: bool) -> None:
    """Of an alternative; one that is none is dropped, and the request goes on."""
    queue = LogprobQueue(None)
    queue.add_upstream(listed(entry("a", top_logprobs=[entry("x", raw)])), "a")
    ((found,),) = queue.take(1)[1:]
    assert [each["bytes"] for each in found["top_logprobs"]] == ([raw] if valid else [])


def test_alternatives_that_the_guard_blocks_are_dropped() -> None:
    queue = LogprobQueue(Cutter())
    queue.add_upstream(listed(entry("a", top_logprobs=[entry("good"), entry("bad")])), "a")
    ((found,),) = queue.take(1)[1:]
    assert [each["token"] for each in found["top_logprobs"]] == ["good"]


def test_tokens_of_another_text_are_dropped() -> None:
    queue = LogprobQueue(None)
    queue.add_upstream(listed(entry("x"), entry("y")), "ab")
    queue.add_upstream(listed(entry("c")), "c")
    assert kept(queue) == ["c"]


def test_what_follows_a_stop_string_is_dropped() -> None:
    queue = LogprobQueue(Cutter())
    for character in "abcd":
        queue.add_upstream(listed(entry(character)), character)
    queue.limit(2)
    assert kept(queue) == ["a", "b"]
