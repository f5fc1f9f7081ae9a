"""A budget ends in mid-stream: what came is billed to the token, and the next month goes on."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from billing.audit import reconcile
from billing.invoicing import invoice_run
from billing.invoicing.invoices import get
from billing.invoicing.views import invoice_json
from billing.notices import budgets
from billing.pricing.prices import load_price_book
from billing.rating.rating_worker import rate_all
from core.clock import FakeClock
from core.database import Database
from core.money import Money
from tests.gateway.deployment import MODEL, Deployment, running_deployment

ASK = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of the toll, at length."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "return_token_ids": True,
    "ignore_eos": True,
    "max_tokens": 300,  # more than is expected of an answer, so the budget has to cover less at first
}


def streamed(deployment: Deployment, **more: Any) -> tuple[int, list[dict[str, Any]]]:
    """Status, and the events of the stream."""
    url = f"{deployment.url}/v1/chat/completions"
    with httpx.stream(
        "POST", url, json=ASK | more, headers=deployment.headers, timeout=30
    ) as answer:
        if answer.status_code != 200:
            return answer.status_code, [json.loads(answer.read())]
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
    return 200, [json.loads(line) for line in lines if line != "[DONE]"]


def billed(deployment: Deployment, clock: FakeClock) -> list[dict[str, Any]]:
    """Invoices of the months that have ended, and clean books."""
    database: Database = deployment.services.database
    result = invoice_run.run(database, clock, current=False)
    assert not result.failed
    with database.read() as session:
        report = reconcile.audit(session)
        assert report.clean, report.differences
        return [invoice_json(session, get(session, each)) for each in result.finalised]


def test_a_budget_that_ends_in_mid_stream_is_billed_to_the_token(tmp_path: Path) -> None:
    clock = FakeClock(datetime(2028, 2, 27, 9, tzinfo=UTC))
    with running_deployment(tmp_path, clock=clock, settings={"moderation": "off"}) as deployment:
        services = deployment.services
        with services.database.transaction() as session:
            price = load_price_book(session).pin(
                deployment.tenant_id, MODEL, None, clock.now(), "USD"
            )
            cap = price.upper_bound(100, 280, adapter=False)
            budgets.create(
                session,
                clock,
                tenant_id=deployment.tenant_id,
                scope="tenant",
                scope_id=deployment.tenant_id,
                cap=Money(cap),
            )
        services.prices.refresh()

        status, events = streamed(deployment)
        assert status == 200
        *chunks, last = events
        assert last["error"]["code"] == "insufficient_quota"
        assert not [c for e in chunks for c in e["choices"] if c["finish_reason"]]
        had = sum(len(c["token_ids"]) for e in chunks for c in e["choices"])
        assert 256 < had < 300
        event = deployment.events(1)[0]
        assert event["output_tokens"] == had
        assert event["finish_reason"] == "insufficient_quota"

        rate_all(services.database, clock)
        services.prices.refresh()
        refused, problem = streamed(deployment)
        assert refused in (402, 429) and problem[0]["error"]["code"] == "insufficient_quota"
        assert len(deployment.events(1)) == 1, "what was refused is not billed"

        clock.set(datetime(2028, 3, 2, 12, tzinfo=UTC))
        services.prices.refresh()
        (february,) = billed(deployment, clock)
        assert february["usage"]["completion_tokens"] == had
        spent = int(february["exact"]["units"])
        one_more = price.upper_bound(0, 2, adapter=False) - price.upper_bound(0, 1, adapter=False)
        assert cap - 2 * one_more <= spent <= cap, "to the last token, and never past it"

        again, events = streamed(deployment, max_tokens=20)
        assert again == 200, "a new month, a new window"
        deployment.events(2)
        clock.set(datetime(2028, 4, 2, 12, tzinfo=UTC))
        (march,) = billed(deployment, clock)
        assert 0 < int(march["exact"]["units"]) <= cap
        assert billed(deployment, clock) == []
