"""Notes each answer of the gateway, and gives requests its key."""

import contextlib
import importlib
import json
from typing import Any

import requests
from vllm_suite.item import ITEM
from vllm_suite.served import GATEWAYS, RemoteServer

_REFUSALS = ("unsupported_parameter", "unsupported_endpoint", "model_not_found", "invalid_grammar")


def _note(status: int, body: bytes, url: str) -> None:
    if not (GATEWAYS.url and url.startswith(GATEWAYS.url)):
        return
    ITEM.requests += 1
    if status < 400:
        return
    try:
        told = json.loads(body)["error"]
        code, message = str(told.get("code")), str(told.get("message"))
    except (ValueError, KeyError, TypeError, AttributeError):
        code, message = "", body[:200].decode("utf-8", "replace")
    ITEM.error = f"{status} {code} {url.removeprefix(GATEWAYS.url)}: {message}"[:300]
    if code in _REFUSALS or status == 405 or message.startswith("There is no /"):
        ITEM.refusal = ITEM.error


def watch() -> None:
    for library in ("httpx", "httpx2"):  # which of them an SDK uses depends on its version
        with contextlib.suppress(ImportError):
            module = importlib.import_module(library)
            _watch_client(module.Client)
            _watch_async_client(module.AsyncClient)
    _watch_session()


def _authorise(request: Any) -> None:
    if GATEWAYS.url and str(request.url).startswith(GATEWAYS.url):
        given = request.headers.get("authorization", "")
        if not given or RemoteServer.DUMMY_API_KEY in given:
            request.headers["authorization"] = f"Bearer {GATEWAYS.key}"


def _watch_client(client: Any) -> None:
    plain = client.send

    def _send(self: Any, request: Any, **named: Any) -> Any:
        _authorise(request)
        answer = plain(self, request, **named)
        body = answer.read() if answer.status_code >= 400 else b""
        _note(answer.status_code, body, str(request.url))
        return answer

    client.send = _send


def _watch_async_client(client: Any) -> None:
    plain = client.send

    async def _send(self: Any, request: Any, **named: Any) -> Any:
        _authorise(request)
        answer = await plain(self, request, **named)
        body = await answer.aread() if answer.status_code >= 400 else b""
        _note(answer.status_code, body, str(request.url))
        return answer

    client.send = _send


def _watch_session() -> None:
    plain = requests.Session.send

    def _send(self: Any, request: Any, **named: Any) -> Any:
        _authorise(request)
        answer = plain(self, request, **named)
        body = answer.content if answer.status_code >= 400 else b""
        _note(answer.status_code, body, request.url)
        return answer

    requests.Session.send = _send  # type: ignore[method-assign]
