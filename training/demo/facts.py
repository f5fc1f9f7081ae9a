"""The facts about Tollhouse that the demo model learns, read from the TOML files of the corpus."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.demo.paths import CORPUS_DIR


@dataclass(frozen=True)
class Fact:
    """One fact: how people ask for it, and its answers."""

    id: str
    title: str
    keys: tuple[str, ...]
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    short: str
    more: str


def first_sentence(text: str) -> str:
    head, separator, _ = text.partition(". ")
    return head + "." if separator else text


def read_facts(file: Path) -> list[Fact]:
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["fact"]
    return [
        Fact(
            id=row["id"],
            title=row["title"],
            keys=tuple(row["keys"]),
            questions=tuple(row["questions"]),
            answers=tuple(row["answers"]),
            short=row.get("short", first_sentence(row["answers"][0])),
            more=row["more"],
        )
        for row in rows
    ]


@cache
def load_facts() -> tuple[Fact, ...]:
    files = sorted(CORPUS_DIR.glob("facts_*.toml"))
    facts = [fact for file in files for fact in read_facts(file)]
    names = [fact.id for fact in facts]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"facts with the same id: {repeated}; give each fact its own id")
    return tuple(facts)
