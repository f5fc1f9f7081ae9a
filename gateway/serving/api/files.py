"""/v1/files in OpenAI's format: the input and output files of batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import FormData, UploadFile

from core.batches import files
from core.batches.models import StoredFile
from core.database import Database
from core.errors import BadRequest, UnsupportedParameter
from core.tenants.keys import Principal
from gateway.edge.threads import Work, run_as
from gateway.edge.uploads import bounded_form
from gateway.serving.api.dependencies import (
    Caller,
    ClockDep,
    CountedCaller,
    DatabaseDep,
    QuotasDep,
    SettingsDep,
)

router = APIRouter(prefix="/v1", tags=["files"])
FORM_OVERHEAD = 64 << 10  # bytes that a form may have besides its file
_LIFETIME_S = (3_600, 2_592_000)
_UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


@dataclass(frozen=True)
class _Store:
    database: DatabaseDep
    clock: ClockDep
    quotas: QuotasDep

    def take(
        self, caller: Principal, given: UploadFile, lifetime_s: int | None, max_bytes: int
    ) -> dict[str, Any]:
        name = (given.filename or "file").rpartition("/")[2][:255]
        size = given.size or 0
        with self.database.transaction() as session:
            self.quotas.check(session, caller.tenant_id, caller.plan, size)
            result = files.store(
                session,
                self.clock,
                tenant_id=caller.tenant_id,
                project_id=caller.project_id,
                key_id=caller.key_id,
                filename=name if name.isprintable() else "file",
                purpose="batch",
                content=iter(lambda: given.file.read(files.CHUNK_BYTES), b""),
                max_bytes=max_bytes,
                lifetime_s=lifetime_s,
            )
            return file_json(result)


@router.post("/files", openapi_extra=_UPLOAD)
async def upload(
    request: Request,
    caller: CountedCaller,
    settings: SettingsDep,
    store: Annotated[_Store, Depends(_Store)],
) -> dict[str, Any]:
    max_bytes = settings.max_file_mb << 20
    async with bounded_form(request, max_bytes + FORM_OVERHEAD) as form:
        purpose, given = form.get("purpose"), form.get("file")
        if purpose != "batch":
            raise UnsupportedParameter(
                "purpose must be batch; no other purpose is supported.",
                next_step="Send purpose=batch.",
                param="purpose",
            )
        if not isinstance(given, UploadFile):
            raise BadRequest("The form has no file.", next_step="Add it as `file`.", param="file")
        lifetime_s = _lifetime(form) or settings.file_days * 86_400 or None
        return await run_as(Work.UPLOADS, store.take, caller, given, lifetime_s, max_bytes)


@router.get("/files")
def list_files(
    database: DatabaseDep,
    clock: ClockDep,
    caller: Caller,
    *,
    purpose: str | None = None,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1_000,
    order: Literal["asc", "desc"] = "desc",
) -> dict[str, Any]:
    with database.read() as session:
        rows = files.all_of(
            session,
            caller.scope,
            clock.now(),
            purpose=purpose,
            after=after,
            limit=limit + 1,
            newest_first=order == "desc",
        )
    return list_page([file_json(each) for each in rows], limit)


@router.get("/files/{file_id}")
def get_file(
    file_id: str, database: DatabaseDep, clock: ClockDep, caller: Caller
) -> dict[str, Any]:
    with database.read() as session:
        return file_json(files.get(session, caller.scope, file_id, clock.now()))


@router.delete("/files/{file_id}")
def delete_file(
    file_id: str, database: DatabaseDep, clock: ClockDep, caller: CountedCaller
) -> dict[str, Any]:
    with database.transaction() as session:
        files.remove(session, caller.scope, file_id, clock.now())
    return {"id": file_id, "object": "file", "deleted": True}


@router.get("/files/{file_id}/content", response_class=StreamingResponse)
def file_content(
    file_id: str, database: DatabaseDep, clock: ClockDep, caller: Caller
) -> StreamingResponse:
    with database.read() as session:
        file = files.get(session, caller.scope, file_id, clock.now())
    headers = {"content-length": str(file.bytes), "x-content-type-options": "nosniff"}
    return StreamingResponse(
        _content(database, file), media_type="application/octet-stream", headers=headers
    )


def file_json(file: StoredFile) -> dict[str, Any]:
    result = {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": int(file.created_at.timestamp()),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }
    if file.expires_at is not None:
        result["expires_at"] = int(file.expires_at.timestamp())
    return result


def list_page(data: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """One page of a list; `data` may have one item more than `limit`, which sets `has_more`."""
    page = data[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(data) > limit,
    }


def _content(database: Database, file: StoredFile) -> Iterator[bytes]:
    with database.read() as session:
        yield from files.content(session, file)


def _lifetime(form: FormData) -> int | None:
    given = form.get("expires_after[seconds]")
    if given is None:
        return None
    low, high = _LIFETIME_S
    number = (
        int(given)
        if isinstance(given, str) and (given.isascii() and given.isdecimal()) and len(given) < 9
        else 0
    )
    if form.get("expires_after[anchor]") != "created_at" or not low <= number <= high:
        raise BadRequest(
            f"expires_after must have the anchor created_at and {low} to {high} seconds.",
            next_step="Correct it, or remove it to keep the file.",
            param="expires_after",
            code="invalid_value",
        )
    return number
