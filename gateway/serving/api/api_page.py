"""/docs: the API's document in Swagger UI, from files of this package alone, so that it works offline."""

import gzip
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from core.errors import NotFound

router = APIRouter(prefix="/docs", include_in_schema=False)
_HERE = Path(__file__).with_name("swagger_ui")
_TYPES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "start.js": "text/javascript",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}


@router.get("")
def api_page() -> Response:
    return Response(_read("page.html"), media_type="text/html", headers=_HEADERS)


@router.get("/{name}")
def part(name: str, request: Request) -> Response:
    """A script or style sheet of the page; compressed for each browser that says it can read that."""
    if name not in _TYPES:
        raise NotFound(f"There is no page /docs/{name[:100]}.", next_step="Open /docs.")
    headers = _HEADERS | {"cache-control": "max-age=3600", "vary": "accept-encoding"}
    content = _read(name)
    if not (_HERE / name).exists():
        if "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
        else:
            content = gzip.decompress(content)
    return Response(content, media_type=_TYPES[name], headers=headers)


@cache
def _read(name: str) -> bytes:
    file = _HERE / name
    return (file if file.exists() else file.with_name(f"{name}.gz")).read_bytes()
