"""/admin/v1/adapters: adapters are uploaded, or registered from a directory that the operator allows."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.datastructures import FormData, UploadFile

from core.errors import BadRequest, ModelNotFound
from core.tenants import adapters
from gateway.api.admin.access import Allowed, Visit
from gateway.catalog.adapter_files import AdapterFiles
from gateway.catalog.adapter_store import MAX_BYTES, AdapterStore
from gateway.schemas.admin import AdapterFromPath
from gateway.uploads import bounded_form
from gateway.wiring import Services

router = APIRouter(prefix="/admin/v1/adapters", tags=["adapters"])
Reads = Annotated[Visit, Depends(Allowed("adapters", "read"))]
Writes = Annotated[Visit, Depends(Allowed("adapters", "write"))]
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
def list_adapters(visit: Reads) -> dict[str, Any]:
    with visit.services.database.read() as session:
        found = adapters.all_of(session, visit.scope)
        return {"object": "list", "data": [adapters.describe(each) for each in found]}


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_adapter(request: Request, visit: Writes) -> dict[str, Any]:
    """Send an archive as `file`, or the two files of a PEFT adapter as `config` and `weights`."""
    services = visit.services
    async with bounded_form(request, MAX_BYTES + 2**20) as form:
        name = adapters.check_name(str(form.get("name", "")))
        base = base_model(services, str(form.get("base_model", "")))
        files = await asyncio.to_thread(_stored, store_of(services), visit.scope.tenant_id, form)
    return await asyncio.to_thread(register, visit, name, base, files)


@router.post("/from-path", status_code=201)
def take_adapter(body: AdapterFromPath, visit: Writes) -> dict[str, Any]:
    base = base_model(visit.services, body.base_model)
    files = store_of(visit.services).from_path(body.path)
    return register(visit, body.name, base, files)


@router.delete("/{name}")
def remove_adapter(name: str, visit: Writes) -> dict[str, Any]:
    return remove(visit, name)


def store_of(services: Services) -> AdapterStore:
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


def register(visit: Visit, name: str, base: str, files: AdapterFiles) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        made = adapters.register(
            session,
            visit.scope,
            services.clock,
            name=name,
            base_model=base,
            digest=files.digest,
            path=str(files.path),
            rank=files.rank,
            bytes=files.bytes,
        )
        shown = adapters.describe(made)
    services.adapters.refresh()
    return shown


def remove(visit: Visit, name: str) -> dict[str, Any]:
    services = visit.services
    with services.database.transaction() as session:
        shown = adapters.describe(adapters.remove(session, visit.scope, services.clock, name))
    services.adapters.refresh()
    return shown


def _stored(store: AdapterStore, tenant_id: str, form: FormData) -> AdapterFiles:
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
