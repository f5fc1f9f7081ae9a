"""A page as data: tiles, charts, tables and forms, laid out by one template. A form is a real one, so
every page works without script.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from dashboards.filters import Range
from dashboards.render import page
from dashboards.tables import Table

InputKind = Literal["text", "email", "password", "number", "date", "url", "select", "area", "file"]


@dataclass(frozen=True, slots=True)
class Tile:
    title: str
    value: str
    note: str = ""
    about: str = ""  # the definition behind the figure
    state: str = ""  # "", good, warn or bad; the words say it too
    href: str = ""
    meter: str = ""  # a drawing of `charts.meter`


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    label: str
    kind: InputKind = "text"
    value: str = ""
    options: Sequence[tuple[str, str]] = ()  # (value, what a person reads)
    required: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """`confirm` is a name that must be typed before the act; the server checks it again."""

    path: str  # under the dashboard's root
    button: str
    fields: dict[str, str] = field(default_factory=dict)
    inputs: Sequence[Input] = ()
    confirm: str = ""
    account: str = ""  # whose password it is, for password managers
    danger: bool = False
    title: str = ""
    about: str = ""
    method: Literal["post", "get"] = "post"
    act: str = ""  # of the first button, where there are several
    also: tuple[tuple[str, str], ...] = ()  # further buttons: (act, words)

    @property
    def has_file(self) -> bool:
        return any(each.kind == "file" for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    drawing: Markup


@dataclass(frozen=True, slots=True)
class Sheet:
    title: str
    lead: str
    tiles: Sequence[Tile] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    forms: Sequence[Form] = ()
    span: Range | None = None  # shows the filter of dates
    groups: dict[str, str] = field(default_factory=dict)
    by: str = ""
    narrow: Sequence[Input] = ()  # further filters beside the dates
    back: tuple[str, str] | None = None  # (path, words)
    link: tuple[str, str] | None = None  # (path, words): the next thing to look at
    away: tuple[str, str] | None = None  # (address, words): a page of somebody else
    once: str = ""  # a secret that is shown this one time
    after: Sequence[Table] = ()  # behind the forms
    remarks: Sequence[str] = ()  # under the figures, in words
    problem: str = ""
    pager: Sequence[tuple[str, str]] = ()  # (words, address) of the other pages of the first table


def show(request: Request, sheet: Sheet, status: int = 200, **more: Any) -> Response:
    return page(request, "sheet.html", status, sheet=sheet, **more)
