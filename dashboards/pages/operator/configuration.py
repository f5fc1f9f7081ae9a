"""Configuration: every setting of this process, where its value comes from, secrets hidden."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dashboards.page_data import PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.scales import grouped
from dashboards.tables import Column, Table

PATH = "/operator/configuration"
COLUMNS = [
    Column("name", "Setting", "code"),
    Column("value", "Value", "code", "Passwords, tokens and keys are hidden."),
    Column(
        "source",
        "From",
        "badge",
        "The default, the environment, the settings file, or the command that started the process.",
    ),
    Column("about", "About"),
]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    settings = deps_of(request).backend.configuration()
    rows = [
        {"name": each.name, "value": each.value, "source": each.source, "about": each.about}
        for each in sorted(settings, key=lambda each: each.source == "default")
    ]
    table = Table("Settings in force", COLUMNS, rows, totals=False)
    if wants_csv(request):
        return table.csv("configuration")
    chosen = sum(each.source != "default" for each in settings)
    page_data = PageData(
        "Configuration",
        "The settings of the gateway process that answers this page. A change takes effect when the "
        "processes are started again.",
        tiles=[
            Tile("Set", grouped(chosen), "other than by default"),
            Tile("Defaults", grouped(len(settings) - chosen)),
        ],
        tables=[table],
    )
    return show(request, page_data)


ROUTES = [Route(PATH, page_of)]
