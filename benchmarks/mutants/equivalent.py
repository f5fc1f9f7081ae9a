"""Mutants that a person has judged to change nothing that can be observed: `equivalent.toml`."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.mutate import Mutant
from benchmarks.mutants.replace import enclosing_function

ROOT = Path(__file__).parents[2]
_LIST = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, slots=True)
class Change:
    """A line of a file, without its indentation, before and after."""

    file: str
    function: str  # qualified; "" outside functions
    line: str
    becomes: str


def judged_equivalent() -> dict[Change, str]:
    """The reasons."""
    if not _LIST.exists():
        return {}
    listed = tomllib.loads(_LIST.read_text()).get("equivalent", [])
    return {
        Change(each["file"], each["function"], each["line"], each["becomes"]): each["reason"]
        for each in listed
    }


def change_of(mutant: Mutant) -> Change:
    source = (ROOT / mutant.path).read_bytes()
    line = source.count(b"\n", 0, mutant.start)
    before, after = (
        text.splitlines()[line].decode().strip() for text in (source, mutant.apply(source))
    )
    return Change(mutant.path, enclosing_function(mutant, source) or "", before, after)


def without_equivalents(
    mutants: list[Mutant], listed: Collection[Change]
) -> tuple[list[Mutant], int]:
    """The others, and how many were left out."""
    others = [mutant for mutant in mutants if change_of(mutant) not in listed]
    return others, len(mutants) - len(others)
