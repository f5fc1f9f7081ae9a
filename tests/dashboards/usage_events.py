"""A usage event with values of no interest; a test names those that matter to it."""

from datetime import datetime
from typing import Any

from msgspec.structs import replace

from core.events import UsageEvent, UsageKind
from core.ids import new_id


def usage_event(at: datetime, price: str, **changes: Any) -> UsageEvent:
    plain = UsageEvent(
        request_id=new_id("req", int(at.timestamp() * 1000)),
        tenant_id="org_a",
        project_id="proj",
        key_id="key",
        kind=UsageKind.GENERATION,
        route="/v1/completions",
        model="tiny",
        adapter=None,
        adapter_digest=None,
        price_version=price,
        occurred_at=at,
        finished_at=at,
        input_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        waived_tokens=0,
        finish_reason="stop",
        status=200,
        streamed=False,
    )
    return replace(plain, **changes)
