"""`tollhouse model reload`: asks the running gateway, which knows what it serves by."""

import argparse
import json
import urllib.request
from typing import Any
from urllib.error import HTTPError, URLError

from core.errors import Conflict, Unavailable
from core.settings import load_settings
from core.tenants.operator import operator_token
from gateway.admin.console.output import show
from gateway.serving.record import url_here

_PATH = "/admin/v1/engines/upstreams"
_TIMEOUT_S = 60.0


def reload(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    url, token = arguments.url or url_here(settings), operator_token(settings)
    found = _ask(url, token, _PATH)
    if found["changes"] and not arguments.dry_run:
        found = _ask(url, token, f"{_PATH}/reload", {"digest": found["digest"]})
    if arguments.json:
        show(found, as_json=True, title="upstreams")
        return 0
    rows = [{**each, "fields": ", ".join(each["fields"])} for each in found["changes"]]
    title = "would change" if arguments.dry_run else "changed"
    show(rows, as_json=False, title=title if rows else f"{found['file']}: nothing to change")
    return 0


def _ask(url: str, token: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        raise Conflict(_message(error.read())) from None
    except (URLError, OSError) as error:
        raise Unavailable(
            f"No gateway answers at {url}: {error}.",
            next_step="Start one with `tollhouse serve`, or give its address with --url.",
        ) from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
