"""/mcp: account data for MCP clients, over streamable HTTP (modelcontextprotocol.io).

Stateless: each POST is one JSON-RPC message and its response one JSON object. Keys, roles and tenants
are those of the REST routes, and a request counts against the limits on requests.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlsplit

import msgspec
import orjson
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET, Meta, Raw, UnsetType

from core.errors import BadRequest, Forbidden, TollhouseError, Unavailable
from core.ids import REQUEST, new_id
from core.tenants.access import Actor
from gateway.admin.access import ActorDep, AdminContext, RequirePermission, TenantQuery
from gateway.admin.billing import routes as billing
from gateway.admin.finance import routes as finance
from gateway.admin.finance.schemas import COST_GROUPS, USAGE_GROUPS, WIDTHS
from gateway.admin.keys import routes as keys
from gateway.admin.limits import routes as limits
from gateway.admission.request import AdmissionRequest
from gateway.edge import release
from gateway.edge.decoding import Request as Arguments
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

# The tools of /mcp: read-only account data, from the functions of the REST routes.
#
# Arguments are typed and refused by name; a tool needs the permission of its REST route.


_Time = Annotated[int, Meta(ge=0, le=10**11)]
# PostgreSQL has no text with a NUL.
_Text = Annotated[str, Meta(min_length=1, max_length=300, pattern=r"^[^\x00]*$")]
_Names = Annotated[list[_Text], Meta(max_length=200)]


class NoArguments(Arguments, kw_only=True):
    pass


class CostsArguments(Arguments, kw_only=True):
    start_time: Annotated[_Time, Meta(description="Unix time in seconds, inclusive.")]
    end_time: Annotated[_Time | None, Meta(description="Unix time, exclusive; default: now.")] = (
        None
    )
    limit: Annotated[int, Meta(ge=1, le=10_000, description="Maximum buckets per page.")] | None = (
        None
    )
    page: Annotated[_Text | None, Meta(description="next_page of the previous page.")] = None
    project_ids: _Names | None = None
    api_key_ids: _Names | None = None
    group_by: Annotated[_Names | None, Meta(description=f"Any of {', '.join(COST_GROUPS)}.")] = None


class UsageArguments(CostsArguments, kw_only=True):
    bucket_width: Annotated[_Text | None, Meta(description=f"One of {', '.join(WIDTHS)}.")] = None
    models: _Names | None = None
    user_ids: _Names | None = None
    batch: Annotated[
        bool | None, Meta(description="true: only batches; false: everything else.")
    ] = None
    group_by: Annotated[_Names | None, Meta(description=f"Any of {', '.join(USAGE_GROUPS)}.")] = (
        None
    )


class InvoicesArguments(Arguments, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class InvoiceArguments(Arguments, kw_only=True):
    reference: Annotated[_Text, Meta(description="Id or number of the invoice.")]


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    permission: RequirePermission
    arguments: type[Arguments]
    read: Callable[[AdminContext, Any], dict[str, Any]]

    def describe(self) -> dict[str, Any]:
        schema = msgspec.json.schema(self.arguments)
        return {
            "name": self.name,
            "description": self.description,
            "inputSchema": schema["$defs"][self.arguments.__name__],
            "annotations": {"readOnlyHint": True, "openWorldHint": False},
        }


def _parameters(given: Arguments) -> dict[str, list[str]]:
    """As the query of the REST route."""
    found: dict[str, list[str]] = {}
    for name, value in msgspec.structs.asdict(given).items():
        if isinstance(value, bool):
            found[name] = ["true" if value else "false"]
        elif value is not None:
            found[name] = value if isinstance(value, list) else [str(value)]
    return found


_USAGE, _COSTS = RequirePermission("usage", "read"), RequirePermission("costs", "read")
_INVOICES = RequirePermission("invoices", "read")
_LISTED = (
    Tool(
        "get_usage",
        "Tokens and requests in buckets of a minute, an hour or a day.",
        _USAGE,
        UsageArguments,
        lambda ctx, given: finance.usage_of(ctx, _parameters(given)),
    ),
    Tool(
        "get_costs",
        "Charges per day, before tax and credits.",
        _COSTS,
        CostsArguments,
        lambda ctx, given: finance.costs_of(ctx, _parameters(given)),
    ),
    Tool(
        "list_keys",
        "API keys with role, scopes and last use, without their secrets.",
        RequirePermission("keys", "read"),
        NoArguments,
        lambda ctx, _: keys.list_keys(ctx),
    ),
    Tool(
        "list_limits",
        "The limits in force: the plan's, and the organisation's own.",
        RequirePermission("limits", "read"),
        NoArguments,
        lambda ctx, _: limits.list_limits(ctx),
    ),
    Tool(
        "list_invoices",
        "Invoices, the newest first.",
        _INVOICES,
        InvoicesArguments,
        lambda ctx, given: billing.list_invoices(ctx, given.limit),
    ),
    Tool(
        "get_invoice",
        "One invoice with every line and its usage.",
        _INVOICES,
        InvoiceArguments,
        lambda ctx, given: billing.get_invoice(given.reference, ctx),
    ),
)
TOOLS = {tool.name: tool for tool in _LISTED}


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
