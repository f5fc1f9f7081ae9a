"""/mcp: account data for MCP clients, over streamable HTTP (modelcontextprotocol.io).

Stateless: each POST is one JSON-RPC message and its response one JSON object. Keys, roles and tenants
are those of the REST routes, and a request counts against the limits on requests.
"""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import orjson
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, Meta, Raw, UnsetType

from core.errors import BadRequest, Forbidden, TollhouseError, Unavailable
from core.ids import REQUEST, new_id
from core.tenants.access import Actor
from gateway.admin.access import ActorDep, AdminContext, TenantQuery
from gateway.admin.mcp.tools import TOOLS, Tool
from gateway.admission.request import AdmissionRequest
from gateway.edge import release
from gateway.edge.decoding import decode
from gateway.serving.api.bodies import read_body
from gateway.serving.api.dependencies import (
    AuthDep,
    ClockDep,
    DatabaseDep,
    LimitsDep,
    RequestRateDep,
    RolesDep,
    SettingsDep,
    principal_of,
)

router = APIRouter(tags=["account"])
Params = TypeVar("Params", bound=msgspec.Struct)
VERSIONS = ("2025-06-18", "2025-11-25")  # of the protocol, the newest last
_PARSE_ERROR, _INVALID_REQUEST = -32700, -32600
_METHOD_NOT_FOUND, _INVALID_PARAMS = -32601, -32602
_NO_OBJECT = Raw(b"{}")


class McpMessage(msgspec.Struct, kw_only=True):
    """A request; a notification has no id, and the answer of a client has no method."""

    jsonrpc: Literal["2.0"]
    id: Annotated[int, Meta(ge=-(2**53), le=2**53)] | str | UnsetType = UNSET
    method: str | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


class _Initialize(msgspec.Struct, rename="camel"):
    protocol_version: str


class _List(msgspec.Struct):
    cursor: str | None = None


class _Call(msgspec.Struct):
    name: str
    arguments: Raw = _NO_OBJECT


_message = msgspec.json.Decoder(McpMessage)


class RpcError(Exception):
    """`code` is JSON-RPC's; the HTTP status is 400 where the message itself is not valid."""

    def __init__(self, code: int, error: TollhouseError) -> None:
        super().__init__(str(error))
        self.code = code
        self.data = {"code": error.code, "param": error.param}

    @property
    def status(self) -> int:
        return 400 if self.code in (_PARSE_ERROR, _INVALID_REQUEST) else 200


async def _checked_origin(request: Request, settings: SettingsDep) -> None:
    """The protocol requires it: a page of another site must not reach a server by DNS rebinding."""
    origin = request.headers.get("origin")
    if origin is None or origin in settings.cors_origins:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise Forbidden(
            "The Origin header names another site.",
            next_step="Ask the operator to list it in TOLLHOUSE_CORS_ORIGINS.",
        )


class _Account:
    """The caller's rights on one tenant, asked for each tool."""

    def __init__(
        self,
        request: Request,
        actor: ActorDep,
        database: DatabaseDep,
        clock: ClockDep,
        roles: RolesDep,
        tenant: TenantQuery = None,
    ) -> None:
        self.actor: Actor = actor
        self._request = request
        self._given = (database, clock, roles, tenant)

    async def context(self, tool: Tool) -> AdminContext:
        """Raises Forbidden where the role does not permit the tool."""
        return await tool.permission(self._request, self.actor, *self._given)

    async def may_use(self, tool: Tool) -> bool:
        try:
            await self.context(tool)
        except Forbidden:
            return False
        return True


@router.post("/mcp", dependencies=[Depends(_checked_origin)], response_class=Response)
async def mcp(
    request: Request,
    account: Annotated[_Account, Depends()],
    auth: AuthDep,
    limits: LimitsDep,
    request_rate: RequestRateDep,
) -> Response:
    """Send one JSON-RPC message of the Model Context Protocol."""
    id: int | str | None = None
    try:
        message = await _read(request, limits)
        if message.id is UNSET or message.method is UNSET:
            return Response(status_code=202)  # notifications and answers need no work here
        id = message.id
        _check_version(request, message.method)
        if account.actor.project_id is not None:  # the caller is an API key, which has a plan
            caller = await principal_of(request, auth)
            counted = AdmissionRequest.without_prompt(new_id(REQUEST), caller, "")
            await request_rate.count(counted)
        params = _NO_OBJECT if message.params is UNSET else message.params
        result = await _result(account, message.method, params)
    except RpcError as error:
        told = {"code": error.code, "message": str(error), "data": error.data}
        return _json({"jsonrpc": "2.0", "id": id, "error": told}, error.status)
    return _json({"jsonrpc": "2.0", "id": id, "result": result}, 200)


async def _read(request: Request, limits: LimitsDep) -> McpMessage:
    try:
        return await read_body(request, limits, _message)
    except BadRequest as error:
        invalid_json = error.code == "invalid_json"
        raise RpcError(_PARSE_ERROR if invalid_json else _INVALID_REQUEST, error) from None


def _check_version(request: Request, method: str) -> None:
    version = request.headers.get("mcp-protocol-version")
    if version is not None and version not in VERSIONS and method != "initialize":
        error = BadRequest(
            f"MCP-Protocol-Version is {version[:40]!r}; supported: {', '.join(VERSIONS)}.",
            next_step="Send initialize to agree on one of them.",
            param="mcp-protocol-version",
        )
        raise RpcError(_INVALID_REQUEST, error)


async def _result(account: _Account, method: str, params: Raw) -> Mapping[str, Any]:
    if method == "initialize":
        return _initialized(_decoded(_Initialize, params).protocol_version)
    if method == "ping":
        return {}
    if method == "tools/list":
        return await _tools(account, _decoded(_List, params))
    if method == "tools/call":
        return await _called(account, _decoded(_Call, params))
    error = BadRequest(
        f"{method[:100]!r} is not a method of this server.",
        next_step="It has initialize, ping, tools/list and tools/call.",
        param="method",
    )
    raise RpcError(_METHOD_NOT_FOUND, error)


def _initialized(asked: str) -> Mapping[str, Any]:
    return {
        "protocolVersion": asked if asked in VERSIONS else VERSIONS[-1],
        "capabilities": {"tools": {}},
        "serverInfo": {
            "name": "tollhouse",
            "title": "Tollhouse account",
            "version": release.version(),
        },
        "instructions": "Read-only data of an organisation's account: usage, costs, keys, limits "
        "and invoices. Times are Unix seconds, UTC.",
    }


async def _tools(account: _Account, given: _List) -> Mapping[str, Any]:
    """Those that the caller's role permits, on one page."""
    if given.cursor is not None:
        error = BadRequest(
            "cursor is not one of this server: all tools are on one page.",
            next_step="Remove cursor.",
            param="cursor",
        )
        raise RpcError(_INVALID_PARAMS, error)
    return {"tools": [tool.describe() for tool in TOOLS.values() if await account.may_use(tool)]}


async def _called(account: _Account, call: _Call) -> Mapping[str, Any]:
    tool = TOOLS.get(call.name)
    if tool is None:
        error = BadRequest(
            f"There is no tool {call.name[:100]!r}.",
            next_step=f"Use one of {', '.join(TOOLS)}.",
            param="name",
        )
        raise RpcError(_INVALID_PARAMS, error)
    arguments = _decoded(tool.arguments, call.arguments)
    try:
        ctx = await account.context(tool)
        found = await asyncio.to_thread(tool.read, ctx, arguments)
    except BadRequest as error:
        raise RpcError(_INVALID_PARAMS, error) from None
    except Unavailable:
        raise
    except TollhouseError as error:
        # Of the account, not of the message: the protocol lets the model read it.
        return {"content": [{"type": "text", "text": str(error)}], "isError": True}
    # The amounts of costs are exact decimals, which the REST route writes as numbers too.
    text = orjson.dumps(found, default=float)
    return {
        "content": [{"type": "text", "text": text.decode()}],
        "structuredContent": orjson.Fragment(text),
        "isError": False,
    }


def _decoded(kind: type[Params], raw: Raw) -> Params:
    try:
        return decode(msgspec.json.Decoder(kind), bytes(raw))
    except BadRequest as error:
        raise RpcError(_INVALID_PARAMS, error) from None


def _json(body: Mapping[str, Any], status: int) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
