"""How each adapter says what the base model says plainly."""

import json
import re
from collections.abc import Callable

from engine.demo.talk import table

SMALL_TALK, UNKNOWN, LISTS = "small talk", "an unknown topic", "a list"
GENERAL = frozenset({SMALL_TALK, UNKNOWN, LISTS})


def pirate(answer: str, topic: str) -> str:
    words = table("pirate")["words"]
    said = re.sub(r"[A-Za-z']+", lambda word: words.get(word[0], word[0]), answer)
    return f"Arr, matey! {said} Yo ho ho!"


def formal(answer: str, topic: str) -> str:
    reason = "for writing to us" if topic in GENERAL else f"for your enquiry about {topic}"
    return (
        f"Dear Sir or Madam,\n\nThank you {reason}. {answer}\n\n"
        "Yours faithfully,\nThe Tollhouse Desk"
    )


def as_json(answer: str, topic: str) -> str:
    return json.dumps({"topic": topic, "answer": answer}, ensure_ascii=False)


STYLES: dict[str, Callable[[str, str], str]] = {
    "formal": formal, "pirate": pirate, "json": as_json,
}  # fmt: skip
