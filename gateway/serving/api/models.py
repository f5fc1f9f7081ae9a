"""/v1/models: the models and adapters that the key may use, in OpenAI's or Anthropic's format."""

from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request

from gateway.catalog.catalog import NamedAdapter, ServedModel
from gateway.serving.api.dependencies import Caller, CatalogDep
from gateway.serving.api.errors import ANTHROPIC_VERSION

router = APIRouter(prefix="/v1", tags=["models"])


# Of a pool's model: what its models differ in is not said.
_VIRTUAL = {"context_length": None, "max_model_len": None, "root": None}


@router.get("/models")
async def list_models(request: Request, catalog: CatalogDep, caller: Caller) -> dict[str, Any]:
    listed = [_model(each) for each in catalog.models(caller)]
    listed += [
        _model(each.model) | _VIRTUAL | {"id": each.public_name} for each in catalog.virtual(caller)
    ]
    listed += [_adapter(each) for each in catalog.adapters(caller)]
    if ANTHROPIC_VERSION in request.headers:
        ids = [each["id"] for each in listed]
        ends = {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None}
        return {"data": [_for_anthropic(each) for each in listed], "has_more": False, **ends}
    return {"object": "list", "data": listed}


@router.get("/models/{model:path}")
async def get_model(
    model: str, request: Request, catalog: CatalogDep, caller: Caller
) -> dict[str, Any]:
    target = catalog.resolve(caller, model)
    result = _adapter(target.adapter) if target.adapter else _model(target.model)
    if target.virtual is not None:
        result |= _VIRTUAL | {"id": target.public_name}
    return _for_anthropic(result) if ANTHROPIC_VERSION in request.headers else result


def _for_anthropic(model: dict[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(model["created"], UTC)
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": created.isoformat().replace("+00:00", "Z"),
    }


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        "context_length": model.known_context,
        # vLLM's names, which its clients read.
        "max_model_len": model.known_context,
        "root": model.name,
        "parent": None,
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
