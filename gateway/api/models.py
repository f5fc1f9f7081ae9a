"""/v1/models: what this key may name, adapters included."""

from typing import Any

from fastapi import APIRouter

from gateway.api.access import Caller, House
from gateway.catalog import NamedAdapter, ServedModel

router = APIRouter(prefix="/v1", tags=["models"])


@router.get("/models")
async def list_models(services: House, caller: Caller) -> dict[str, Any]:
    catalog = services.pipeline.catalog
    listed = [_model(each) for each in catalog.models(caller)]
    listed += [_adapter(each) for each in catalog.adapters(caller)]
    return {"object": "list", "data": listed}


@router.get("/models/{model:path}")
async def get_model(model: str, services: House, caller: Caller) -> dict[str, Any]:
    target = services.pipeline.catalog.resolve(caller, model)
    return _adapter(target.adapter) if target.adapter else _model(target.model)


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "context_length": model.context_length,
    }


def _adapter(adapter: NamedAdapter) -> dict[str, Any]:
    return {
        "id": f"{adapter.base_model}:{adapter.name}",
        "object": "model",
        "created": int(adapter.created_at.timestamp()),
        "owned_by": "tenant",
        "parent": adapter.base_model,
        "root": adapter.name,
        "digest": adapter.digest,
    }
