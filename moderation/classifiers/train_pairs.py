"""Generates minimal pairs: the same question about something harmless and something harmful.

In `pairs.txt` both sides share verb and frame, so the object decides; in `topics.txt` both share
the topic, so the intent decides.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moderation.classifiers.train_sources import SAFE, Example
from moderation.classifiers.train_synthetic import (
    FOLDER,
    expand,
    expand_once,
    labels_of,
    read_slots,
)

_EACH_PAIR = 170
_EACH_TOPIC = 28
_FRAMES = (
    "How do I {}?",
    "How do I {}?",
    "How do I {}?",
    "How can I {}?",
    "How can I {}?",
    "How could we {}?",
    "How do you {}?",
    "How would someone {}?",
    "how to {}",
    "What is the best way to {}?",
    "What's the best way to {}?",
    "What's the easiest way to {}?",
    "What is a clever way to {}?",
    "What do I need to {}?",
    "What should I use to {}?",
    "Can you tell me how to {}?",
    "Can you teach me to {}?",
    "Could you explain how to {}?",
    "Explain how to {}.",
    "Please show me how to {}.",
    "Give me tips to {}.",
    "List five ways to {}.",
    "Help me {}.",
    "I want to {}. Where do I start?",
    "I want to {}.",
    "I need to {} today, any ideas?",
    "I'm trying to {} but it does not work, what am I doing wrong?",
    "I plan to {} this weekend.",
    "Is there a quick way to {}?",
    "Which tool is right to {}?",
    "Write a short guide on how to {}.",
    "Walk me through how to {}.",
    "My friend would like to {}, what do you recommend?",
    "Where can I learn to {}?",
    "When is the best time to {}?",
    "Any advice for somebody who wants to {} for the first time?",
    "step by step, how do I {}",
    "What are the mistakes to avoid when you {}?",
)


@dataclass(slots=True)
class _Family:
    name: str
    heads: list[str]
    verbs: list[str] = field(default_factory=list)
    endings: list[str] = field(default_factory=lambda: [""])
    safe: list[str] = field(default_factory=list)
    harm: list[str] = field(default_factory=list)


def _families(name: str) -> Iterator[_Family]:
    current: _Family | None = None
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            if current is not None:
                yield current
            family, _, heads = line[1:].partition("]")
            current = _Family(family, heads.split())
        elif line and not line.startswith("#"):
            assert current is not None
            kind, _, text = line.partition(": ")
            _take(current, kind, text)
    assert current is not None
    yield current


def _take(family: _Family, kind: str, text: str) -> None:
    if kind == "do":
        family.verbs = text.split("|")
    elif kind == "more":
        family.endings += text.split("|")
    else:
        getattr(family, kind).append(text)


def pair_examples() -> list[Example]:
    slots = read_slots()
    found: list[Example] = []
    for family in _families("pairs.txt"):
        found += _pairs(family, slots)
    for family in [*_families("topics.txt"), *_families("prompts.txt")]:
        found += _topics(family, slots)
    return found


def _pairs(family: _Family, slots: Mapping[str, list[str]]) -> Iterator[Example]:
    chance = random.Random(f"pairs:{family.name}")
    for kind, objects in (("safe", family.safe), ("harm", family.harm)):
        choices = objects[0].split("|")
        endings = family.endings if kind == "safe" else [""]
        made = set()
        for _ in range(_EACH_PAIR):
            verb, ending = chance.choice(family.verbs), chance.choice(endings)
            thing = expand_once(chance.choice(choices), slots, chance)
            phrase = expand_once(f"{verb} {thing} {ending}".strip(), slots, chance)
            made.add(_cased(chance.choice(_FRAMES).format(phrase), chance))
        labels = SAFE if kind == "safe" else labels_of(family.heads)
        source = f"{kind}:pair_{family.name}"
        yield from (Example(text, dict(labels), source) for text in sorted(made))


def _topics(family: _Family, slots: Mapping[str, list[str]]) -> Iterator[Example]:
    chance = random.Random(f"topics:{family.name}")
    for kind, templates in (("safe", family.safe), ("harm", family.harm)):
        labels = SAFE if kind == "safe" else labels_of(family.heads)
        for template in templates:
            made = {expand(template, slots, chance) for _ in range(_EACH_TOPIC)}
            source = f"{kind}:topic_{family.name}"
            yield from (Example(text, dict(labels), source) for text in sorted(made))


def _cased(text: str, chance: random.Random) -> str:
    text = re.sub(r"\b(the|my|own) (?:an?|the|some|my) ", r"\1 ", " ".join(text.split()))
    return text if chance.random() < 0.8 else text.lower().rstrip("?.")
