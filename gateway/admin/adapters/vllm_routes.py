"""/v1/load_lora_adapter and /v1/unload_lora_adapter as in vLLM, but for one tenant."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from core.tenants import adapters
from gateway.admin.access import AdminContext, RequirePermission
from gateway.serving.api.dependencies import AdaptersDep

router = APIRouter(prefix="/v1", tags=["adapters"])
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "write"))]


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


@router.post("/load_lora_adapter")
def load_lora_adapter(body: LoadAdapter, ctx: WriteAccess, registry: AdaptersDep) -> dict[str, Any]:
    name = adapters.check_name(body.lora_name)
    files = registry.store.from_path(body.lora_path)
    base = registry.base_model(body.base_model_name)
    if body.load_inplace and _differs(ctx, name, files.digest):
        registry.remove(ctx.scope, name)
    return registry.register(ctx.scope, name, base, files)


@router.post("/unload_lora_adapter")
def unload_lora_adapter(
    body: UnloadAdapter, ctx: WriteAccess, registry: AdaptersDep
) -> dict[str, Any]:
    return registry.remove(ctx.scope, body.lora_name)


def _differs(ctx: AdminContext, name: str, digest: str) -> bool:
    with ctx.database.read() as session:
        rows = adapters.all_of(session, ctx.scope)
    return any(each.name == name and each.digest != digest for each in rows)
