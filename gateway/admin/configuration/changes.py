"""The work of one application: what it reads and writes with, what it changed, and secrets to keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy.orm import Session

from core.clock import Clock
from core.errors import BadRequest
from gateway.admin.configuration import document

T = TypeVar("T")
ACTOR = "configuration"


@dataclass(frozen=True, slots=True)
class Change:
    """`before` None: the entry is new; `after` None: it ends."""

    place: str  # such as `tenant acme, key ci`
    before: object
    after: object

    def __str__(self) -> str:
        if self.before is None:
            return f"+ {self.place}" + (f": {self.after}" if self.after != "" else "")
        if self.after is None:
            return f"- {self.place}"
        return f"~ {self.place}: {self.before} -> {self.after}"


@dataclass(slots=True)
class Work:
    """`prune` ends entries that a list of the file does not name. `secrets` are by the file's name."""

    session: Session
    clock: Clock
    prune: bool = False
    changes: list[Change] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)

    def differs(
        self, place: str, before: Mapping[str, object], after: Mapping[str, object]
    ) -> bool:
        """Notes each field that is stated and differs."""
        changed = [name for name in sorted(after) if before.get(name) != after[name]]
        for name in changed:
            self.changes.append(
                Change(f"{place}, {name}", shown(before.get(name)), shown(after[name]))
            )
        return bool(changed)

    def added(self, place: str, value: object = "") -> None:
        self.changes.append(Change(place, None, value))

    def ended(self, place: str) -> None:
        self.changes.append(Change(place, "", None))

    def keep(self, place: str, path: str, secret: str) -> None:
        if path in self.secrets:
            raise BadRequest(f"{place}: two secrets would be written to {path}.")
        self.secrets[path] = secret


def shown(value: object) -> object:
    """`none` for what is not set, since None says that an entry is new or ends."""
    if isinstance(value, document.Part):
        return value.model_dump()
    return "none" if value is None else value


def each_once(entries: Sequence[T], what: str, name: Callable[[T], str]) -> Sequence[T]:
    """The entries. BadRequest for a name that two of them have."""
    document.once([name(each) for each in entries], what)
    return entries
