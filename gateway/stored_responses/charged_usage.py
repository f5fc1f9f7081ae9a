"""The usage of a background response that did not complete: what its usage event charged."""

from typing import Any

from sqlalchemy.orm import Session

from billing.models import UsageEventRow
from core.ids import REQUEST
from core.tenants.scope import TenantScope
from gateway.inference.request import Usage
from gateway.inference.responses.response import usage_object


def with_charged_usage(
    session: Session, scope: TenantScope, response: dict[str, Any]
) -> dict[str, Any]:
    """Without usage as long as its event is not stored."""
    if response["status"] not in ("failed", "cancelled") or response.get("usage"):
        return response
    request_id = f"{REQUEST}_{response['id'].rpartition('_')[2]}"
    row = session.get(UsageEventRow, request_id)
    if row is None or row.tenant_id != scope.tenant_id:
        return response
    usage = Usage(row.input_tokens, row.cached_tokens, row.output_tokens)
    return response | {"usage": usage_object(usage)}
