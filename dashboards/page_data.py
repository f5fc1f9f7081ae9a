"""Pages as data: tiles, charts, tables and forms, rendered by one template. Forms are plain HTML
forms, so that every page works without JavaScript.
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
    about: str = ""  # definition of the value
    state: str = ""  # "", good, warn or bad
    href: str = ""
    meter: str = ""  # SVG of `charts.meter`


@dataclass(frozen=True, slots=True)
class Input:
    name: str
    label: str
    kind: InputKind = "text"
    value: str = ""
    options: Sequence[tuple[str, str]] = ()  # (value, label)
    required: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """`confirm` is a name that the user must type; the server checks it as well."""

    path: str  # under the dashboard's root
    button: str
    fields: dict[str, str] = field(default_factory=dict)
    inputs: Sequence[Input] = ()
    confirm: str = ""
    account: str = ""  # account of the password, for password managers
    danger: bool = False
    title: str = ""
    about: str = ""
    method: Literal["post", "get"] = "post"
    act: str = ""  # value of the first button, if there are several
    also: tuple[tuple[str, str], ...] = ()  # further buttons: (act, label)

    @property
    def has_file(self) -> bool:
        return any(each.kind == "file" for each in self.inputs)


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    drawing: Markup


@dataclass(frozen=True, slots=True)
class PageData:
    title: str
    lead: str
    tiles: Sequence[Tile] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    forms: Sequence[Form] = ()
    span: Range | None = None  # shows the date filter
    groups: dict[str, str] = field(default_factory=dict)
    by: str = ""
    narrow: Sequence[Input] = ()  # further filters
    back: tuple[str, str] | None = None  # (path, label)
    link: tuple[str, str] | None = None  # (path, label) of a related page
    away: tuple[str, str] | None = None  # (URL, label) of an external page
    once: str = ""  # a secret that is shown only once
    after: Sequence[Table] = ()  # tables after the forms
    remarks: Sequence[str] = ()  # paragraphs below the tiles
    problem: str = ""
    pager: Sequence[tuple[str, str]] = ()  # (label, URL) of further pages of the first table


def show(request: Request, page_data: PageData, status: int = 200, **more: Any) -> Response:
    return page(request, "page.html", status, page_data=page_data, **more)
