"""Pages as data: tiles, charts, tables and forms, rendered by one template. Forms are plain HTML
forms, so that every page works without JavaScript.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response

from billing.usage.day_range import Range
from core.errors import TollhouseError
from dashboards.explorer import Bar, CustomPeriod, Link
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
    advanced: bool = False  # folded, with the others that are


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
    problem: str = ""  # why it was refused
    wrong: str = ""  # name of the refused input
    panel: bool = False  # a button above the tables opens it at the side of the page

    @property
    def id(self) -> str:
        """Of its title: `New member` has `new-member`."""
        return self.title.lower().replace(" ", "-")

    @property
    def folded(self) -> list[Input]:
        return [each for each in self.inputs if each.advanced]

    @property
    def folded_open(self) -> bool:
        """Whether one of the folded inputs was refused, or has a value."""
        return any(each.name == self.wrong or each.value for each in self.folded)

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
    actions: Sequence[Form] = ()  # below the tiles
    tables: Sequence[Table] = ()
    forms: Sequence[Form] = ()
    span: Range | None = None  # shows the date filter
    bar: Bar | None = None  # shows the query bar instead
    presets: Sequence[Link] = ()  # periods, where there is no query bar
    custom: CustomPeriod | None = None  # shown next to the periods
    views: Sequence[Link] = ()  # shown next to the periods
    live: bool = False  # its first table can be kept up to date
    groups: dict[str, str] = field(default_factory=dict)
    by: str = ""
    narrow: Sequence[Input] = ()  # further filters
    back: tuple[str, str] | None = None  # (path, label)
    link: tuple[str, str] | None = None  # (path, label) of a related page
    away: tuple[str, str] | None = None  # (URL, label) of an external page
    after: Sequence[Table] = ()  # tables after the forms
    links: Sequence[tuple[str, str]] = ()  # (path, label) of buttons in a row below the tiles
    remarks: Sequence[str] = ()  # paragraphs below the tiles
    problem: str = ""
    pager: Sequence[tuple[str, str]] = ()  # (label, URL) of further pages of the first table

    @property
    def panels(self) -> list[Form]:
        return [each for each in self.forms if each.panel]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A form that was sent and refused. Its page is shown again, with what was typed."""

    fields: dict[str, str]
    error: TollhouseError

    def kept(self, form: Form) -> Form:
        """The form with the reason and the values that were sent, if it is this form; passwords are
        not kept."""
        acts = [form.act, *(act for act, _ in form.also)] if form.act else []
        if acts and self.fields.get("act") not in acts:
            return form
        if any(self.fields.get(name) != value for name, value in form.fields.items()):
            return form
        inputs = [
            replace(each, value=self.fields.get(each.name, each.value))
            if each.kind not in ("password", "file")
            else each
            for each in form.inputs
        ]
        wrong = self.error.param or ""
        return replace(form, inputs=inputs, problem=str(self.error), wrong=wrong)

    def kept_rows(self, table: Table) -> Table:
        """The table with the refused form open in its row."""
        acts = [column.key for column in table.columns if column.kind == "acts"]
        rows = [
            {**row, **{key: [self.kept(each) for each in row[key] or ()] for key in acts}}
            for row in table.rows
        ]
        return replace(table, rows=rows) if acts else table

    def applied(self, page_data: PageData) -> PageData:
        """The page with the refused form kept and its reason next to it; above the page if the form is
        not on it."""
        kept = replace(
            page_data,
            actions=[self.kept(each) for each in page_data.actions],
            forms=[self.kept(each) for each in page_data.forms],
            tables=[self.kept_rows(each) for each in page_data.tables],
            after=[self.kept_rows(each) for each in page_data.after],
        )
        shown = [*kept.actions, *kept.forms]
        for table in (*kept.tables, *kept.after):
            acts = [column.key for column in table.columns if column.kind == "acts"]
            shown += [form for row in table.rows for key in acts for form in row[key]]
        if any(form.problem for form in shown):
            return kept
        return replace(kept, problem=str(self.error))


def show(
    request: Request,
    page_data: PageData,
    status: int = 200,
    template: str = "page.html",
    **more: Any,
) -> Response:
    rejected: Rejected | None = getattr(request.state, "rejected", None)
    if rejected is not None:
        page_data = rejected.applied(page_data)
        status = rejected.error.status
    return page(request, template, status, page_data=page_data, **more)
