"""The tools of /mcp: read-only account data, from the functions of the REST routes.

Arguments are typed and refused by name; a tool needs the permission of its REST route.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.billing import routes as billing
from gateway.admin.finance import routes as finance
from gateway.admin.finance.schemas import COST_GROUPS, USAGE_GROUPS, WIDTHS
from gateway.admin.keys import routes as keys
from gateway.admin.limits import routes as limits
from gateway.edge.decoding import Request as Arguments

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
