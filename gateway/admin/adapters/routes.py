"""/admin/v1/adapters: adapters are uploaded, or registered from a directory that the operator allows."""

from contextlib import AbstractContextManager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile

from core.errors import BadRequest
from core.tenants import adapters
from core.tenants.scope import TenantScope
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.schemas import AdapterFromPath
from gateway.catalog.adapter_archive import AdapterFiles
from gateway.catalog.adapter_registry import AdapterRegistry
from gateway.catalog.adapter_store import MAX_BYTES, AdapterStore
from gateway.edge.threads import Work, run_as
from gateway.edge.uploads import bounded_form
from gateway.serving.api.dependencies import AdaptersDep

router = APIRouter(prefix="/admin/v1/adapters", tags=["adapters"])
MAX_UPLOAD_BYTES = MAX_BYTES + 2**20  # with the form around the files
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "write"))]
OperatorAccess = Annotated[OperatorContext, Depends(RequireOperator("operations", "write"))]
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
    with ctx.database.read() as session:
        rows = adapters.all_of(session, ctx.scope)
        return {"object": "list", "data": [adapters.describe(each) for each in rows]}


@router.post(
    "",
    status_code=201,
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def upload_adapter(
    request: Request, ctx: WriteAccess, registry: AdaptersDep
) -> dict[str, Any]:
    """Send an archive as `file`, or the two files of a PEFT adapter as `config` and `weights`."""
    async with bounded_form(request, MAX_UPLOAD_BYTES) as form:
        name = adapters.check_name(str(form.get("name", "")))
        base = registry.base_model(str(form.get("base_model", "")))
        return await run_as(Work.UPLOADS, _register_upload, registry, ctx.scope, (name, base), form)


@router.post("/from-path", status_code=201)
def take_adapter(body: AdapterFromPath, ctx: WriteAccess, registry: AdaptersDep) -> dict[str, Any]:
    base = registry.base_model(body.base_model)
    return registry.register(ctx.scope, body.name, base, registry.store.from_path(body.path))


@router.post("/{digest}/release")
def release_adapter(digest: str, ctx: OperatorAccess, registry: AdaptersDep) -> dict[str, Any]:
    """Let weights in quarantine be used again. For the operator."""
    return {"object": "list", "data": registry.release(digest, ctx.actor.id)}


@router.delete("/{name}")
def remove_adapter(name: str, ctx: WriteAccess, registry: AdaptersDep) -> dict[str, Any]:
    return registry.remove(ctx.scope, name)


def _register_upload(
    registry: AdapterRegistry, scope: TenantScope, names: tuple[str, str], form: FormData
) -> dict[str, Any]:
    """`names` are those of the adapter and of its base model."""
    with _uploaded(registry.store, form) as files:
        return registry.register(scope, *names, files)


def _uploaded(store: AdapterStore, form: FormData) -> AbstractContextManager[AdapterFiles]:
    archive, config, weights = (form.get(part) for part in ("file", "config", "weights"))
    if isinstance(archive, UploadFile):
        return store.from_archive(archive.file)
    if isinstance(config, UploadFile) and isinstance(weights, UploadFile):
        return store.from_files(config.file, weights.file)
    raise BadRequest(
        "The form contains no adapter.",
        next_step="Send an archive as `file`, or `config` and `weights`.",
        param="file",
    )


vllm_router = APIRouter(prefix="/v1", tags=["adapters"])


class LoadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=120)
    lora_path: str = Field(min_length=1, max_length=1024)
    base_model_name: str = Field("", max_length=120, description="Default: the only model served.")
    load_inplace: bool = Field(False, description="Replace the adapter of this name.")


class UnloadAdapter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(min_length=1, max_length=120)
    lora_int_id: int | None = Field(None, description="Ignored: the name identifies the adapter.")


@vllm_router.post("/load_lora_adapter")
def load_lora_adapter(body: LoadAdapter, ctx: WriteAccess, registry: AdaptersDep) -> dict[str, Any]:
    name = adapters.check_name(body.lora_name)
    files = registry.store.from_path(body.lora_path)
    base = registry.base_model(body.base_model_name)
    if body.load_inplace and _differs(ctx, name, files.digest):
        registry.remove(ctx.scope, name)
    return registry.register(ctx.scope, name, base, files)


@vllm_router.post("/unload_lora_adapter")
def unload_lora_adapter(
    body: UnloadAdapter, ctx: WriteAccess, registry: AdaptersDep
) -> dict[str, Any]:
    return registry.remove(ctx.scope, body.lora_name)


def _differs(ctx: AdminContext, name: str, digest: str) -> bool:
    with ctx.database.read() as session:
        rows = adapters.all_of(session, ctx.scope)
    return any(each.name == name and each.digest != digest for each in rows)
