"""kill -9 in the middle of 32 streams: nothing lost, nothing twice, the ledger exact."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from core.database import Database
from tests.journeys.deployments import (
    Command,
    RunningGateway,
    StreamResult,
    audit_when_settled,
    serve,
    streams,
)

PROTECTS = (
    "gateway/metering",
    "gateway/answers",
    "gateway/engines/local.py",
    "gateway/engines/remote.py",
    "engine/worker",
    "engine/receipts.py",
    "billing/usage",
    "billing/rating",
    "billing/ledger",
)
STREAMS = 32


def in_the_middle(
    deployment: RunningGateway, act: Callable[[], None], *, max_tokens: int = 400
) -> list[StreamResult]:
    """Start the streams, call `act` once a quarter of them runs, and return what the clients saw. A
    timer would come too early on a busy machine and too late on a fast one.
    """
    running: set[str] = set()
    enough = threading.Event()

    def _heard(seen: StreamResult) -> None:
        if seen.chunks > 2:
            running.add(seen.request_id)
        if len(running) >= STREAMS // 4:
            enough.set()

    def _act() -> None:
        enough.wait(60)
        act()

    actor = threading.Thread(target=_act)
    actor.start()
    seen = asyncio.run(streams(deployment, STREAMS, max_tokens=max_tokens, heard=_heard))
    actor.join()
    return seen


def events_of(url: str) -> dict[str, dict[str, Any]]:
    database = Database(url)
    with database.read() as session:
        rows = session.execute(text("select * from usage_events")).mappings()
        found = {row["request_id"]: dict(row) for row in rows}
    database.close()
    return found


def check(seen: list[StreamResult], events: dict[str, dict[str, Any]]) -> None:
    """Every answer has its event; nobody got a token that is not on it, or pays one too many."""
    for each in seen:
        if not each.request_id:
            continue
        event = events[each.request_id]
        assert each.chunks <= event["output_tokens"] + event["waived_tokens"], event
        if event["finish_reason"] == "gateway_lost":  # the client had it, but for its last event
            assert each.tokens - each.last <= event["output_tokens"] <= each.tokens, (each, event)
        if each.usage is not None:
            assert each.usage["completion_tokens"] == event["output_tokens"]
            assert each.usage["prompt_tokens"] == event["input_tokens"]


@pytest.mark.proof
def test_killing_the_gateway_and_the_engine_loses_and_doubles_nothing(tmp_path: Path) -> None:
    command = Command(tmp_path)
    deployment = serve(command)
    try:
        seen = in_the_middle(deployment, deployment.process.kill)
        deployment.kill()
        assert any(each.failed for each in seen) and any(each.chunks for each in seen)

        deployment = serve(command)
        report = audit_when_settled(command)
        assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
        url = f"sqlite:///{tmp_path / 'tollhouse.db'}"
        check(seen, events_of(url))
        settled = [events_of(url)[each.request_id] for each in seen if each.request_id]
        assert any(event["settled_by"] == "receipt" for event in settled)
        assert any(event["finish_reason"] == "gateway_lost" for event in settled)

        (engine,) = deployment.children()
        seen = in_the_middle(deployment, lambda: os.kill(engine, signal.SIGKILL))
        assert any(each.failed for each in seen)
        deadline = time.monotonic() + 60
        while asyncio.run(streams(deployment, 1, max_tokens=4))[0].usage is None:
            assert time.monotonic() < deadline, "the engine was not started again"
            time.sleep(0.5)
        report = audit_when_settled(command)
        assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
        check(seen, events_of(url))
    finally:
        assert deployment.stop() == 0
