"""Adapters: upload with validation, removal, residency on the engines, and cost."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from billing.usage.day_range import Range
from core.errors import NotFound, TollhouseError
from core.tenants import adapters, audit
from dashboards import usage_totals
from dashboards.backend import Upload
from dashboards.page_data import Form, Input, PageData, show
from dashboards.pages.common import (
    deps_of,
    operator_of,
    redirect_with_notice,
    require_confirmation,
    viewer_of,
    wants_csv,
)
from dashboards.tables import Column, Table
from dashboards.viewer import Viewer

PATH = "/adapters"
COLUMNS = [
    Column("name", "Name in `model`"),
    Column(
        "digest",
        "Digest, first 16",
        "code",
        "SHA-256 of the weights, which identifies the adapter.",
    ),
    Column("rank", "Rank", "whole"),
    Column("bytes", "Bytes", "whole"),
    Column("at", "Registered", "moment"),
    Column(
        "lies",
        "On the engines",
        about="A resident adapter serves at once; others are loaded first.",
    ),
    Column("requests", "Requests, 30 days", "whole"),
    Column("tokens", "Tokens out, 30 days", "whole"),
]


def page_of(request: Request, problem: str = "", name: str = "") -> Response:
    viewer, deps = viewer_of(request, "adapters"), deps_of(request)
    now = deps.clock.now()
    span = Range(now.date() - timedelta(29), now.date())
    with deps.database.read() as session:
        found = adapters.all_of(session, viewer.scope)
        used = usage_totals.read(session, viewer.scope, span, now, "adapter").counts
    can_edit = deps.auth.may(viewer, "adapters", "write")
    sees_costs = deps.auth.may(viewer, "costs", "read")
    residency_by_digest = deps.backend.residency()
    rows = [
        _row(each, used.get(each.name, {}), residency_by_digest.get(each.digest, {}))
        | {"acts": [*_preload_forms(each.name, viewer), _remove_form(each.name)]}
        for each in found
    ]
    columns = list(COLUMNS)
    if sees_costs:
        columns.append(
            Column("amount", "Cost, 30 days", "money", "Charges of requests that used the adapter.")
        )
    if can_edit:
        columns.append(Column("acts", "Change", "acts"))
    empty = "No adapters yet. They are uploaded in the format that PEFT saves."
    step = ("#new-adapter", "Upload an adapter") if can_edit else None
    table = Table(
        "Adapters", columns, rows, viewer.currency, totals=False, empty=empty, next_step=step
    )
    if wants_csv(request):
        return table.csv("adapters")
    page_data = PageData(
        "Adapters",
        "Your own LoRA weights for a base model. Select one with `model: base:name`.",
        tables=[table],
        forms=[_upload(list(deps.backend.base_models()), name)] if can_edit else [],
        problem=problem,
    )
    return show(request, page_data, 400 if problem else 200)


def _row(
    each: Any,
    used: dict[str, int],
    states: Mapping[str, int],
) -> dict[str, Any]:
    return {
        "name": f"{each.base_model}:{each.name}",
        "digest": each.digest[:16],
        "rank": each.rank,
        "bytes": each.bytes,
        "at": each.created_at,
        "lies": f"in quarantine: {each.quarantine_reason}"
        if each.quarantined_at
        else ", ".join(f"{states[state]} {state}" for state in sorted(states)) or "none",
        "requests": used.get("requests", 0),
        "tokens": used.get("output_tokens", 0),
        "amount": used.get("amount", 0),
    }


def _remove_form(name: str) -> Form:
    return Form(PATH, "Remove", {"act": "remove", "name": name}, confirm=name, danger=True)


def _preload_forms(name: str, viewer: Viewer) -> list[Form]:
    """For operators only: what is preloaded takes the engines' memory from other tenants' adapters."""
    return [Form(PATH, "Preload", {"act": "preload", "name": name})] if viewer.operator else []


def _upload(models: list[str], name: str) -> Form:
    inputs = [
        Input("name", "Name", value=name, hint="letters, digits, dots, hyphens, underscores"),
        Input("base", "Base model", "select", "", [(each, each) for each in models]),
        Input("archive", "Archive", "file", required=False, hint="tar, tar.gz or zip"),
        Input("config", "or adapter_config.json", "file", required=False),
        Input("weights", "and adapter_model.safetensors", "file", required=False),
    ]
    return Form(
        PATH,
        "Check and register",
        {"act": "add"},
        inputs,
        title="New adapter",
        panel=True,
        about="Weights are read as safetensors and never unpickled. Rank, target modules and shapes "
        "are checked; an invalid adapter is rejected with the reason and not stored.",
    )


async def change(request: Request) -> Response:
    async with request.form(max_files=4, max_fields=8) as form:
        if form.get("act") == "remove":
            return await run_in_threadpool(_remove, request, form)
        if form.get("act") == "preload":
            return await run_in_threadpool(_preload, request, form)
        return await run_in_threadpool(_add, request, form)


def _add(request: Request, form: FormData) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    name, base = (str(form.get(key, "")).strip() for key in ("name", "base"))
    files = {}
    for key in ("archive", "config", "weights"):
        part = form.get(key)
        if isinstance(part, UploadFile) and part.filename:
            files[key] = part.file
    try:
        deps.backend.add_adapter(viewer.scope, name, base, Upload(**files))
    except TollhouseError as error:
        return page_of(request, f"{error.message} {error.next_step}".strip(), name)
    return redirect_with_notice(request, PATH, "adapter-added")


def _remove(request: Request, form: FormData) -> Response:
    viewer, deps = viewer_of(request, "adapters", "write"), deps_of(request)
    form_fields = {key: str(form.get(key, "")) for key in ("name", "confirm")}
    require_confirmation(form_fields, form_fields["name"])
    with deps.database.transaction() as session:
        adapters.remove(session, viewer.scope, deps.clock, form_fields["name"])
    deps.backend.changed()
    return redirect_with_notice(request, PATH, "adapter-removed")


def _preload(request: Request, form: FormData) -> Response:
    viewer, deps = operator_of(request, "adapters", "write"), deps_of(request)
    name = str(form.get("name", ""))
    with deps.database.transaction() as session:
        found = {each.name: each for each in adapters.all_of(session, viewer.scope)}.get(name)
        if found is None:
            raise NotFound(
                f"There is no adapter {name[:80]!r}.", next_step="Choose one from the table."
            )
        actor = viewer.scope.actor
        audit.record_operator(
            session, deps.clock, actor, "adapter.preload", name, before=None, after={}
        )
    deps.backend.preload(found.digest)
    return redirect_with_notice(request, PATH, "adapter-preloads")


ROUTES = [Route(PATH, page_of, methods=["GET"]), Route(PATH, change, methods=["POST"])]
