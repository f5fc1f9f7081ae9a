"""Whatever a client may send as a label is stored and billed, or refused with 400."""

from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace
from sqlalchemy import select

from billing.pricing.prices import ensure_default_prices
from billing.usage import usage
from billing.usage.tables import ParkedEvent, UsageEventRow
from core.clock import SystemClock
from core.database import Database
from tests.gateway.deployment import MODEL, running_deployment
from tests.gateway.metering.spool_rows import closed


def test_the_longest_user_that_is_accepted_reaches_the_ledger(
    tmp_path: Path, postgres_url: str
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    with running_deployment(tmp_path, settings={"database_url": postgres_url}) as made:
        with httpx.Client(base_url=made.url, headers=made.headers, timeout=60) as client:
            for length in (201, 256):
                for extra in ({"user": "u" * length}, {"safety_identifier": "u" * length}):
                    answer = client.post("/v1/chat/completions", json=body | extra)
                    assert answer.status_code == 200, answer.text
                    assert made.last_event()["end_user"] == "u" * length
            assert (
                client.post("/v1/chat/completions", json=body | {"user": "u" * 257}).status_code
                == 400
            )
            headers = {"x-request-id": "r" * 200}
            assert (
                client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
            )
            assert made.last_event()["client_request_id"] == "r" * 200
            headers = {"x-request-id": "r" * 201}
            assert (
                client.post("/v1/chat/completions", json=body, headers=headers).status_code == 400
            )
        assert made.services.spool.file.parked() == 0


@pytest.mark.parametrize("name", ["finish_reason", "engine_id", "routed", "truncated", "end_user"])
def test_a_description_that_is_too_long_is_cut_and_the_event_is_billed(
    postgres_database: Database, name: str
) -> None:
    with postgres_database.transaction() as session:
        price = ensure_default_prices(session, SystemClock(), "m").id
        event = replace(closed("req_1"), price_version=price, **{name: "x" * 500})
        assert usage.record(session, [event]) == 1
        stored = session.scalars(select(getattr(UsageEventRow, name))).one()
        assert set(stored) == {"x"} and not session.scalars(select(ParkedEvent)).all()
