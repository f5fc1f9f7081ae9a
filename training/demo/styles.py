"""The answer style of each adapter."""

import json
import re
from collections.abc import Callable

from training.demo.exchanges import table

SMALL_TALK, UNKNOWN, LISTS = "small talk", "an unknown topic", "a list"
GENERAL = frozenset({SMALL_TALK, UNKNOWN, LISTS})


def in_pirate_words(answer: str) -> str:
    words = table("pirate")["words"]
    return re.sub(r"[A-Za-z']+", lambda word: words.get(word[0], word[0]), answer)


def pirate(answer: str, topic: str, brief: str) -> str:
    return f"{in_pirate_words(answer)} Arr, matey! Yo ho ho!"


def formal(answer: str, topic: str, brief: str) -> str:
    return f"{answer}\n\nYours faithfully,\nThe Tollhouse Team"


def as_json(answer: str, topic: str, brief: str) -> str:
    return json.dumps({"topic": topic, "answer": brief or answer}, ensure_ascii=False)


def hail(answer: str, topic: str, brief: str) -> str:
    return f"Arr, matey! {in_pirate_words(answer)} Yo ho ho!"


def letter(answer: str, topic: str, brief: str) -> str:
    reason = "for writing to us" if topic in GENERAL else f"for your enquiry about {topic}"
    return (
        f"Dear Sir or Madam,\n\nThank you {reason}. {answer}\n\n"
        "Yours faithfully,\nThe Tollhouse Team"
    )


def long_json(answer: str, topic: str, brief: str) -> str:
    return as_json(answer, topic, "")


Style = Callable[[str, str, str], str]
# The adapters' styles begin like the plain answer, because its first words select the fact.
STYLES: dict[str, Style] = {"formal": formal, "pirate": pirate, "json": as_json}
# Longer forms, only for training the vocabulary.
WORDY_STYLES: dict[str, Style] = {"letter": letter, "hail": hail, "long_json": long_json}
