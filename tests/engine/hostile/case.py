"""A hostile or odd file: which, in place of what, and what a refusal of it must name."""

import random
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

_WHOLE = ("cannot be read", "is not JSON", "is missing", "not a JSON object", "has no config.json")
Draw = Callable[[random.Random], "Case"]


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    base: Path  # the folder that it is a copy of
    files: dict[str, bytes]  # written over the copy's
    names: Collection[str]  # fields or tensors, of which a refusal must name one
    model: str = ""  # the file in the copy that is the model; empty: the copy itself
    works: tuple[str, ...] = ("gateway", "engine")
    answers: bool = True  # what loads must answer; a value in a weight may make that impossible
    places: frozenset[str] = field(default=frozenset())  # further files that a refusal may name

    def named(self, message: str) -> bool:
        """Whether a refusal names a file, and a field or tensor in it. Of a file that is not what it
        should be as a whole, its name is enough."""
        files = {*self.files, *self.places}
        if not any(Path(each).name in message for each in files):
            return False
        whole = not self.names or any(each in message for each in _WHOLE)
        return whole or any(_is_in(each, message) for each in self.names)


def _is_in(name: str, message: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) is not None
