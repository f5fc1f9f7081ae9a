"""What `gateway/edge/http_protocol.py` and `direct.py` rely on inside uvicorn. These parts are private:
the upper bound in pyproject.toml is lifted once this file passes on a newer version."""

import ast
import asyncio
import inspect
import logging
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from uvicorn import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import Server, ServerState

ROOT = Path(__file__).parents[3]
OVERRIDDEN = [
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
]
PROTOCOL = [
    "access_logger",
    "client",
    "config",
    "cycle",
    "flow",
    "headers",
    "limit_concurrency",
    "logger",
    "loop",
    "parser",
    "pipeline",
    "scope",
    "server_state",
    "tasks",
    "timeout_keep_alive",
    "timeout_keep_alive_handler",
    "transport",
    "url",
]
FLOW = ["drain", "read_paused", "resume_reading", "write_paused"]
CYCLE = [
    "body",
    "default_headers",
    "disconnected",
    "flow",
    "keep_alive",
    "message_event",
    "more_body",
    "on_response",
    "receive",
    "response_complete",
    "response_started",
    "send",
    "transport",
]
ARGUMENTS = [
    "scope",
    "transport",
    "flow",
    "logger",
    "access_logger",
    "access_log",
    "default_headers",
    "message_event",
    "expect_100_continue",
    "keep_alive",
    "on_response",
]


async def _app(scope: Any, receive: Any, send: Any) -> None: ...


class Transport(asyncio.Transport):
    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def connected() -> HttpToolsProtocol:
    config = Config(_app, http=HttpToolsProtocol, lifespan="off")
    config.load()
    protocol = HttpToolsProtocol(config, ServerState(), {}, asyncio.get_running_loop())
    protocol.connection_made(Transport())
    return protocol


async def test_a_protocol_has_the_parts_that_are_used() -> None:
    protocol = await connected()
    protocol.on_message_begin()
    protocol.on_url(b"/v1/models")
    assert [name for name in PROTOCOL if not hasattr(protocol, name)] == []
    assert protocol.url == b"/v1/models" and protocol.headers == []
    assert {"type", "scheme", "client", "headers"} <= set(protocol.scope)
    assert isinstance(protocol.tasks, set)
    assert hasattr(protocol.server_state, "default_headers")
    for name in OVERRIDDEN:
        assert callable(getattr(HttpToolsProtocol, name))
    for name in ("get_method", "get_http_version", "should_upgrade", "should_keep_alive"):
        assert callable(getattr(protocol.parser, name))


async def test_a_cycle_takes_and_has_the_parts_that_are_used() -> None:
    taken = list(inspect.signature(RequestResponseCycle.__init__).parameters)[1:]
    assert taken == ARGUMENTS
    protocol = await connected()
    cycle = RequestResponseCycle(
        scope={},  # type: ignore[typeddict-item]
        transport=Transport(),
        flow=protocol.flow,
        logger=logging.getLogger(),
        access_logger=logging.getLogger(),
        access_log=False,
        default_headers=[(b"a", b"b")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=True,
        on_response=lambda: None,
    )
    assert [name for name in CYCLE if not hasattr(cycle, name)] == []
    assert (cycle.body, cycle.more_body, cycle.response_complete) == (bytearray(), True, False)
    assert [name for name in FLOW if not hasattr(FlowControl(Transport()), name)] == []
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"
    assert list(inspect.signature(Server.handle_exit).parameters) == ["self", "sig", "frame"]


def test_the_lists_name_all_that_is_used() -> None:
    """Attributes that the subclasses read and do not define themselves."""
    source = (ROOT / "gateway/edge/http_protocol.py").read_text()
    cycle = (ROOT / "gateway/edge/direct.py").read_text()
    assert used(source, "BoundedHttp", "self") == set(PROTOCOL)
    found = used(cycle, "DirectCycle", "self") | used(cycle, "DirectExchange", "cycle")
    assert found - {"head", "finish"} <= set(CYCLE)


def used(source: str, name: str, owner: str) -> set[str]:
    tree = ast.parse(source)
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)
    names = {
        node.attr
        for node in ast.walk(found)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
    }
    defined = {n.name for n in found.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {each for each in names - defined if not each.startswith("_")} - {"disconnect_callback"}


def test_the_version_has_an_upper_bound_that_the_lock_keeps() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (uvicorn,) = [
        wanted
        for each in project["dependencies"]
        if (wanted := Requirement(each)).name == "uvicorn"
    ]
    assert any(each.operator == "<" for each in uvicorn.specifier)
    assert version("uvicorn") in uvicorn.specifier
    pinned = next(
        line.partition("==")[2]
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("uvicorn==")
    )
    assert pinned in uvicorn.specifier
