"""Dialogues other than facts: small talk, lists, refusals, and the parts of system prompts."""

import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from training.demo.paths import CORPUS_DIR


@dataclass(frozen=True)
class Exchange:
    """Ways to say the same thing, and the model's answers."""

    says: tuple[str, ...]
    answers: tuple[str, ...]


@cache
def table(name: str) -> dict[str, Any]:
    """One TOML file of the corpus."""
    return tomllib.loads((CORPUS_DIR / f"{name}.toml").read_text(encoding="utf-8"))


def exchanges(name: str) -> list[Exchange]:
    rows = table(name)["exchange"]
    return [Exchange(tuple(row["says"]), tuple(row["answers"])) for row in rows]
