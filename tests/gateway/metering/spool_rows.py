"""Requests as the spool holds them, for processes that need no gateway: its import takes seconds."""

from datetime import UTC, datetime

from core.events import OpenedRequest, SettledBy, UsageEvent, UsageKind
from gateway.metering.meter import Counts, Outcome, usage_event

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def opened(name: str) -> OpenedRequest:
    return OpenedRequest(
        request_id=name,
        tenant_id="org_a",
        project_id="proj_a",
        key_id="key_a",
        kind=UsageKind.GENERATION,
        route="/v1/chat/completions",
        model="m",
        adapter=None,
        adapter_digest=None,
        price_version="price_1",
        opened_at=NOW,
        prompt_tokens=10,
        engine_id="engine",
    )


def closed(name: str, output: int = 5) -> UsageEvent:
    return usage_event(
        opened(name),
        Counts(10, 4, output, 1),
        Outcome(finished_at=NOW, finish_reason="stop", status=200, settled_by=SettledBy.GATEWAY),
    )
