"""/admin/v1/adapters: adapters are uploaded, or registered from a directory that the operator allows."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.datastructures import FormData, UploadFile

from core.errors import BadRequest, ModelNotFound
from core.tenants import adapters
from gateway.api.admin.access import AdminContext, RequirePermission
from gateway.api.admin.schemas import AdapterFromPath
from gateway.catalog.adapter_files import AdapterFiles
from gateway.catalog.adapter_store import MAX_BYTES, AdapterStore
from gateway.http.uploads import bounded_form
from gateway.wiring import Services

router = APIRouter(prefix="/admin/v1/adapters", tags=["adapters"])
MAX_UPLOAD_BYTES = MAX_BYTES + 2**20  # with the form around the files
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "write"))]
_FORM = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "base_model": {
            "type": "string",
            "description": "May be omitted where the deployment serves a single model.",
        },
        "file": {"type": "string", "format": "binary", "description": "tar, tar.gz or zip"},
        "config": {"type": "string", "format": "binary", "description": "adapter_config.json"},
        "weights": {"type": "string", "format": "binary", "description": "…safetensors"},
    },
}


@router.get("")
def list_adapters(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.services.database.read() as session:
        rows = adapters.all_of(session, ctx.scope)
        return {"object": "list", "data": [adapters.describe(each) for each in rows]}


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_adapter(request: Request, ctx: WriteAccess) -> dict[str, Any]:
    """Send an archive as `file`, or the two files of a PEFT adapter as `config` and `weights`."""
    services = ctx.services
    async with bounded_form(request, MAX_UPLOAD_BYTES) as form:
        name = adapters.check_name(str(form.get("name", "")))
        base = base_model(services, str(form.get("base_model", "")))
        files = await asyncio.to_thread(
            _store_upload, adapter_store(services), ctx.scope.tenant_id, form
        )
    return await asyncio.to_thread(register, ctx, name, base, files)


@router.post("/from-path", status_code=201)
def take_adapter(body: AdapterFromPath, ctx: WriteAccess) -> dict[str, Any]:
    base = base_model(ctx.services, body.base_model)
    files = adapter_store(ctx.services).from_path(body.path)
    return register(ctx, body.name, base, files)


@router.delete("/{name}")
def remove_adapter(name: str, ctx: WriteAccess) -> dict[str, Any]:
    return remove(ctx, name)


def adapter_store(services: Services) -> AdapterStore:
    settings = services.settings
    return AdapterStore(settings.data_dir / "adapters", settings.adapter_dirs)


def base_model(services: Services, name: str) -> str:
    """The base model called `name`; with an empty name, the only model served."""
    known = services.catalog.model_names()
    if not name and len(known) == 1:
        return known[0]
    if name not in known:
        raise ModelNotFound(
            f"There is no base model {name[:120]!r}; there are: {', '.join(known) or 'none'}.",
            next_step="Set base_model to one of them.",
            param="base_model",
        )
    return name


def register(ctx: AdminContext, name: str, base: str, files: AdapterFiles) -> dict[str, Any]:
    services = ctx.services
    with services.database.transaction() as session:
        adapter = adapters.register(
            session,
            ctx.scope,
            services.clock,
            name=name,
            base_model=base,
            digest=files.digest,
            path=str(files.path),
            rank=files.rank,
            bytes=files.bytes,
        )
        shown = adapters.describe(adapter)
    services.adapters.refresh()
    return shown


def remove(ctx: AdminContext, name: str) -> dict[str, Any]:
    services = ctx.services
    with services.database.transaction() as session:
        shown = adapters.describe(adapters.remove(session, ctx.scope, services.clock, name))
    services.adapters.refresh()
    return shown


def _store_upload(store: AdapterStore, tenant_id: str, form: FormData) -> AdapterFiles:
    archive, config, weights = (form.get(part) for part in ("file", "config", "weights"))
    if isinstance(archive, UploadFile):
        return store.from_archive(tenant_id, archive.file)
    if isinstance(config, UploadFile) and isinstance(weights, UploadFile):
        return store.from_files(tenant_id, config.file, weights.file)
    raise BadRequest(
        "The form contains no adapter.",
        next_step="Send an archive as `file`, or `config` and `weights`.",
        param="file",
    )
