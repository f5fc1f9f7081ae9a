"""The usage of a background response that did not complete: what its usage event charged."""

from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from billing.usage.raw_rows import Reading, Wanted
from billing.usage.reading import read_rows
from billing.usage.tables import UsageEventRow
from core.ids import REQUEST, moment_of
from core.tenants.scope import TenantScope
from gateway.formats.responses.response import usage_object
from gateway.request.inference import Usage

_E = UsageEventRow
_COUNTS = (_E.input_tokens, _E.cached_tokens, _E.output_tokens)
_AROUND = timedelta(days=1)  # a request occurs when its id is made, by clocks that may differ


def with_charged_usage(
    session: Session, scope: TenantScope, response: dict[str, Any]
) -> dict[str, Any]:
    """Without usage as long as its event is not stored, or lies on a ClickHouse that does not answer."""
    if response["status"] not in ("failed", "cancelled") or response.get("usage"):
        return response
    request_id = f"{REQUEST}_{response['id'].rpartition('_')[2]}"
    at = datetime.fromtimestamp(moment_of(request_id) / 1000, UTC)
    wanted = Wanted(at - _AROUND, at + _AROUND, scope.tenant_id)
    only = (_E.request_id == request_id,)
    reading = Reading(_COUNTS, (_E.occurred_at,), conditions=only, limit=1)
    for counts in read_rows(session, wanted, reading, lacks=[]):
        return response | {"usage": usage_object(Usage(*counts))}
    return response
