"""A deployment on a disk that is really full for a while: database, spool, receipts and logs at once."""

import asyncio
import time
from pathlib import Path

import httpx
import pytest

from tests.journeys.deployments import (
    Command,
    RunningGateway,
    StreamResult,
    audit_when_settled,
    serve,
    streams,
)
from tests.journeys.test_kill import check, events_of, in_the_middle
from tests.small_disk import fill, free, small_disk

PROTECTS = (
    "gateway/metering",
    "engine/receipts.py",
    "core/database.py",
    "core/logs.py",
    "billing/usage",
)


def refusal(deployment: RunningGateway) -> httpx.Response:
    body = {
        "model": "tollhouse-demo",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Is there room?"}],
    }
    url = f"{deployment.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=deployment.headers, timeout=60)


def answered(deployment: RunningGateway) -> list[StreamResult]:
    """One that is read to its end, once there is room again."""
    deadline = time.monotonic() + 120
    while True:
        seen = asyncio.run(streams(deployment, 1, max_tokens=4))
        if seen[0].usage is not None:
            return seen
        assert time.monotonic() < deadline, "no answer though the disk has room"
        time.sleep(0.5)


@pytest.mark.proof
def test_a_disk_that_is_full_in_the_middle_of_streams_loses_and_doubles_nothing(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "data", 256) as disk:
        deployment = serve(Command(disk))
        try:
            seen = in_the_middle(deployment, lambda: fill(disk))
            assert sum(each.usage is not None for each in seen) > 0, "what was admitted is served"
            refused = refusal(deployment)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "spool_unavailable"
            assert "Free disk space" in refused.text and refused.headers["retry-after"]
            assert deployment.process.poll() is None and deployment.children(), "all still run"
            free(disk)
            seen += answered(deployment)
            report = audit_when_settled(Command(disk))
            assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
            assert report["spool"]["parked"] == 0
            check(seen, events_of(f"sqlite:///{disk / 'tollhouse.db'}"))
        finally:
            free(disk)
            assert deployment.stop() == 0
