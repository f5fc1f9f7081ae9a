"""Routes that clients know and this house does not serve: said by name, never a bare 404."""

from fastapi import APIRouter

from core.errors import NotFound
from gateway.api.access import Caller

router = APIRouter(prefix="/v1", include_in_schema=False)


@router.post("/embeddings")
async def embeddings(caller: Caller) -> None:
    raise NotFound(
        "No model here makes embeddings.",
        next_step="Add an upstream that does; GET /v1/models lists what there is.",
        code="embeddings_not_supported",
        param="model",
    )


@router.api_route("/files", methods=["GET", "POST"])
@router.api_route("/files/{rest:path}", methods=["GET", "DELETE"])
@router.api_route("/batches", methods=["GET", "POST"])
@router.api_route("/batches/{rest:path}", methods=["GET", "POST"])
async def batches(caller: Caller, rest: str = "") -> None:
    raise NotFound(
        "Files and batches are not served yet.",
        next_step="Send the requests one by one.",
        code="batches_not_supported",
    )
