"""Generates labelled sentences from the templates in `synthetic/`: minimal pairs, and examples for
heads with little data.

Both sides use the same words (a process is killed, a person is killed), so that the model must
learn from the context.
"""

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from moderation.classifiers.train_sources import ANY, SAFE, Example, harm
from moderation.scoring import WINDOW

FOLDER = Path(__file__).with_name("synthetic")
_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{(\w+)\}")
# Heads that a harmful family does not name stay unknown, except for these.
_SEXUAL_TERMS = "sexual anatomy / sexual acts"


def read_slots() -> dict[str, list[str]]:
    slots = {}
    for file in ("slots.txt", "lexicon.txt"):
        for line in (FOLDER / file).read_text(encoding="utf-8").splitlines():
            if line and not line.startswith("#"):
                name, _, fillers = line.partition(":")
                slots[name] = [filler.strip() for filler in fillers.split("|")]
    return slots


def read_families(name: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield (family, heads, templates) of one template file."""
    family, heads, templates = "", list[str](), list[str]()
    for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            if templates:
                yield family, heads, templates
            family, _, named = line[1:].partition("]")
            heads, templates = named.split(), []
        elif line and not line.startswith("#"):
            templates.append(line)
    yield family, heads, templates


def expand_once(text: str, slots: Mapping[str, list[str]], chance: random.Random) -> str:
    return _SLOT.sub(lambda slot: chance.choice(slots[slot.group(1)]), text)


def expand(template: str, slots: Mapping[str, list[str]], chance: random.Random) -> str:
    """Fill one template at random; choices may hold slots and fillers may not hold choices."""
    text = template
    while (found := _CHOICE.search(text)) is not None:
        pick = chance.choice(found.group(1).split("|"))
        text = text[: found.start()] + pick + text[found.end() :]
    text = expand_once(text, slots, chance)
    text = re.sub(r"\s+([?.,])", r"\1", " ".join(text.split()))
    return text[:1].upper() + text[1:] if chance.random() < 0.8 else text.lower().rstrip("?.")


def _family(
    source: str,
    labels: Mapping[str, float],
    templates: list[str],
    slots: Mapping[str, list[str]],
    each: int,
    weight: float,
) -> Iterator[Example]:
    chance = random.Random(source)
    for template in templates:
        made = {expand(template, slots, chance) for _ in range(each)}
        yield from (Example(text, dict(labels), source, weight) for text in sorted(made))


def synthetic_examples(terms: Mapping[str, list[str]], each: int = 40) -> list[Example]:
    """Generate about `each` sentences per template. `terms`: the profanity list by category."""
    slots = read_slots()
    found: list[Example] = []
    for family, _, templates in read_families("safe.txt"):
        found += _family(f"safe:{family}", SAFE, templates, slots, each, 1.0)
    for family, _, templates in read_families("lookalikes.txt"):
        found += _family(f"safe:{family}", SAFE, templates, slots, each, 1.0)
    for family, heads, templates in read_families("harmful.txt"):
        found += _family(f"harm:{family}", labels_of(heads), templates, slots, each, 1.0)
    return found + list(_term_sentences(terms))


def labels_of(heads: list[str]) -> dict[str, float]:
    if heads == ["prompt_attack"]:
        return {"prompt_attack": 1.0}
    return {**_silent(heads), **harm(*heads)}


def _silent(heads: list[str]) -> dict[str, float]:
    """Labels that are certainly 0: a burglary is not sexual, an erotic story is not illicit."""
    sure = {"prompt_attack": 0.0}
    if "sexual" not in heads:
        sure["sexual"] = 0.0
    if "self-harm" not in heads:
        sure["self-harm"] = 0.0
    if not {"hate", "harassment"} & set(heads):
        sure["hate"] = 0.0
    if "illicit" in heads and "violence" not in heads:
        sure["violence"] = 0.0
    return sure


_FRAMES = (
    "I want your {term} right now",
    "she showed him her {term}",
    "{term} videos and pictures for free",
    "they talked about {term} all night and then did it again and again",
    "he kept whispering about {term} in her ear",
)


def _term_sentences(terms: Mapping[str, list[str]]) -> Iterator[Example]:
    """Put every sexual term of the list into a sentence, so that all of them are in training."""
    chance = random.Random("terms")
    for term in sorted(terms.get(_SEXUAL_TERMS, [])):
        for frame in chance.sample(_FRAMES, 2):
            labels = {"sexual": 1.0, ANY: 1.0, "self-harm": 0.0, "illicit": 0.0, "hate": 0.0}
            yield Example(frame.format(term=term), labels, "harm:sexual_terms", 0.5)


def composites(examples: list[Example], count: int, seed: int = 11) -> list[Example]:
    """Windows as inference sees them: a harmful passage among benign text, or benign text alone."""
    chance = random.Random(seed)
    calm = [e for e in examples if e.labels == SAFE and len(e.text) > 30]
    rough = [
        e
        for e in examples
        if e.labels.get(ANY) == 1.0 and e.weight >= 0.5 and 20 < len(e.text) < 300
    ]
    found = []
    for number in range(count):
        size = chance.randint(180, WINDOW)
        picked = chance.choice(rough) if number % 2 else None
        filler = size - (len(picked.text) if picked else 0)
        parts: list[str] = []
        while sum(map(len, parts)) < filler:
            parts.append(chance.choice(calm).text[: max(30, filler)])
        text = " ".join(parts)[: max(0, filler)]
        if picked is not None:
            cut = chance.choice([0, len(text), text.find(" ", len(text) // 2)])
            text = " ".join((text[:cut], picked.text, text[cut:]))
        labels = SAFE if picked is None else picked.labels
        found.append(Example(text.strip(), dict(labels), "composite", 0.7))
    return found


def windowed(examples: list[Example], most: int = 4) -> list[Example]:
    """Cut long texts into windows as in inference; only the first two of an attack keep labels."""
    found = []
    for example in examples:
        if len(example.text) <= WINDOW:
            found.append(example)
            continue
        starts = range(0, len(example.text) - WINDOW // 3, WINDOW)
        kept = list(starts)[: most if example.labels.get(ANY) == 0.0 else 2]
        found += [replace(example, text=example.text[at : at + WINDOW]) for at in kept]
    return found
