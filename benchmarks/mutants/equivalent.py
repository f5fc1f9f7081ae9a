"""Mutants that a person has judged to change nothing that can be observed: `equivalent.toml`."""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutants.mutate import Mutant, mutants_of
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
    before, after = _lines(mutant, source)
    return Change(mutant.path, enclosing_function(mutant, source) or "", before, after)


def listed_in(file: str, listed: Collection[Change]) -> set[Change]:
    """Those of the listed changes that a mutant of the file makes. Only mutants whose lines are listed
    are parsed: a file has hundreds."""
    source = (ROOT / file).read_bytes()
    lines = {(change.line, change.becomes) for change in listed if change.file == file}
    wanted = mutants_of(file, source, lambda mutant: _lines(mutant, source) in lines)
    return {change_of(mutant) for mutant in wanted} & set(listed)


def _lines(mutant: Mutant, source: bytes) -> tuple[str, str]:
    """The first line that it changes, without its indentation, before and after."""
    first = source.rfind(b"\n", 0, mutant.start) + 1
    texts = (
        source[first:],
        source[first : mutant.start] + mutant.after.encode() + source[mutant.end :],
    )
    before, after = (text.partition(b"\n")[0].decode().strip() for text in texts)
    return before, after


def without_equivalents(
    mutants: list[Mutant], listed: Collection[Change]
) -> tuple[list[Mutant], int]:
    """The others, and how many were left out."""
    others = [mutant for mutant in mutants if change_of(mutant) not in listed]
    return others, len(mutants) - len(others)
