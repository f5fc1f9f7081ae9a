"""Prompt templates: create them, add versions, choose the one in use and remove them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from core.tenants import prompt_templates
from core.tenants.models import PromptTemplate, PromptVersion
from core.tenants.prompt_templates import variables_of
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    Fields,
    deps_of,
    form_handler,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.tables import Column, Table

PATH = "/prompts"
COLUMNS = [
    Column("name", "Name"),
    Column("id", "Id", "code"),
    Column("version", "Version", "whole"),
    Column("state", "State", "badge", "Requests that name no version use the current one."),
    Column("variables", "Variables"),
    Column("text", "Text"),
    Column("created", "Created", "moment"),
]
_SHOWN = 200  # characters of a text


def page_of(request: Request) -> Response:
    viewer, deps = viewer_of(request, "adapters"), deps_of(request)
    can_edit = deps.auth.may(viewer, "adapters", "write")
    with deps.database.read() as session:
        prompts = prompt_templates.all_of(session, viewer.scope)
        rows = [
            _row(each, version, can_edit)
            for each in prompts
            for version in reversed(prompt_templates.versions(session, each))
        ]
    acts = [Column("acts", "Change", "acts")] if can_edit else []
    table = Table(
        "Prompts and their versions",
        [*COLUMNS, *acts],
        rows,
        totals=False,
        empty="No prompts yet. Requests name one by its id, with the texts of its variables.",
        next_step=("#new-prompt", "Create a prompt") if can_edit else None,
    )
    if wants_csv(request):
        return table.csv("prompts")
    page_data = PageData(
        "Prompts",
        "Templates that requests name in prompt. A version never changes.",
        tables=[table],
        forms=_forms(prompts) if can_edit else [],
    )
    return show(request, page_data)


def _row(prompt: PromptTemplate, version: PromptVersion, can_edit: bool) -> dict[str, Any]:
    text = " / ".join(f"{each['role']}: {each['content']}" for each in version.messages)
    current = version.version == prompt.current_version
    named = {"prompt": prompt.id, "version": str(version.version)}
    acts = [] if current else [Form(PATH, "Use", {"act": "use", **named})]
    if current:
        remove = {"act": "remove", "prompt": prompt.id}
        about = "Requests that name it are refused."
        form = Form(PATH, "Remove", remove, confirm=prompt.name, danger=True, about=about)
        acts.append(form)
    return {
        "name": prompt.name,
        "id": prompt.id,
        "version": version.version,
        "state": "current" if current else "earlier",
        "variables": ", ".join(variables_of(version.messages)),
        "text": text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…",
        "created": version.created_at,
        "acts": acts if can_edit else [],
    }


def _forms(prompts: list[PromptTemplate]) -> list[Form]:
    texts = [
        Input("system", "System message", "area", required=False),
        Input("user", "User message", "area", required=False, hint="{{name}} is a placeholder."),
    ]
    fields = [Input("name", "Name"), *texts]
    new = Form(PATH, "Create prompt", {"act": "create"}, fields, title="New prompt", panel=True)
    if not prompts:
        return [new]
    listed = Input("prompt", "Prompt", "select", options=[(each.id, each.name) for each in prompts])
    add = Form(
        PATH, "Add version", {"act": "add"}, [listed, *texts], title="New version", panel=True
    )
    return [add, new]


def _messages(form_fields: Fields) -> list[dict[str, str]]:
    texts = ((role, form_fields.get(role, "")) for role in ("system", "user"))
    return [{"role": role, "content": text} for role, text in texts if text]


def _create(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    with deps.database.transaction() as session:
        name, messages = form_fields.get("name", ""), _messages(form_fields)
        prompt_templates.create(session, viewer.scope, deps.clock, name=name, messages=messages)
    return redirect_with_notice(request, PATH, "prompt-made")


def _add(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    with deps.database.transaction() as session:
        wanted, messages = form_fields.get("prompt", ""), _messages(form_fields)
        prompt_templates.add_version(session, viewer.scope, deps.clock, wanted, messages)
    return redirect_with_notice(request, PATH, "prompt-version")


def _use(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    number = form_fields.get("version", "")
    if not (number.isascii() and number.isdecimal() and len(number) < 9):
        raise BadRequest(f"{number[:20]!r} is not a version.", param="version")
    with deps.database.transaction() as session:
        wanted, chosen = form_fields.get("prompt", ""), int(number)
        prompt_templates.change(session, viewer.scope, deps.clock, wanted, current_version=chosen)
    return redirect_with_notice(request, PATH, "prompt-used")


def _remove(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    with deps.database.transaction() as session:
        prompt = prompt_templates.get(session, viewer.scope, form_fields.get("prompt", ""))
        require_confirmation(form_fields, prompt.name)
        prompt_templates.remove(session, viewer.scope, deps.clock, prompt.id)
    return redirect_with_notice(request, PATH, "prompt-removed")


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(page_of, create=_create, add=_add, use=_use, remove=_remove),
        methods=["POST"],
    ),
]
