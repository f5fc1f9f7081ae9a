"""Multipart uploads with an enforced size limit, whatever the Content-Length header says."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Request
from starlette.datastructures import FormData
from starlette.requests import ClientDisconnect
from starlette.types import Message

from core.errors import BadRequest, PayloadTooLarge


@asynccontextmanager
async def bounded_form(
    request: Request, max_bytes: int, max_files: int = 4, max_fields: int = 8
) -> AsyncIterator[FormData]:
    """Spools files above 1 MB to disk. Raises PayloadTooLarge above `max_bytes` bytes in total."""
    received = 0

    async def _receive() -> Message:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise PayloadTooLarge(f"The body is larger than {max_bytes >> 20} MiB.", param="file")
        return message

    content_length = request.headers.get("content-length", "0")
    if (content_length.isascii() and content_length.isdigit()) and int(content_length) > max_bytes:
        raise PayloadTooLarge(f"The body is larger than {max_bytes >> 20} MiB.", param="file")
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise BadRequest(
            "The body is not multipart/form-data.", next_step="Send the file as a form part."
        )
    bounded = Request(request.scope, _receive)
    try:
        async with bounded.form(max_files=max_files, max_fields=max_fields) as form:
            yield form
    except ClientDisconnect:
        raise BadRequest("The client disconnected during the upload.", param="file") from None
