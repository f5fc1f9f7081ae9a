"""kill -9 while a background response runs: the next gateway shows it as failed, with its charge."""

import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.journeys.deployments import Command, RunningGateway, audit_when_settled, serve

PROTECTS = (
    "gateway/serving/background",
    "gateway/serving/stored_responses",
    "gateway/metering",
    "core/responses",
)
LEASE_ENDS = "update stored_responses set lease_until = '2000-01-01 00:00:00.000000'"


def get(gateway: RunningGateway, response_id: str) -> Any:
    url = f"{gateway.url}/v1/responses/{response_id}"
    answer = httpx.get(url, headers=gateway.headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def until(gateway: RunningGateway, response_id: str, *states: str) -> Any:
    deadline = time.monotonic() + 90
    while (found := get(gateway, response_id))["status"] not in states:
        assert time.monotonic() < deadline, found["status"]
        time.sleep(0.2)
    return found


@pytest.mark.proof
def test_a_response_of_a_killed_gateway_fails_with_its_charge(tmp_path: Path) -> None:
    command = Command(tmp_path)
    gateway = serve(command)
    try:
        models = httpx.get(f"{gateway.url}/v1/models", headers=gateway.headers).json()["data"]
        body = {
            "model": models[0]["id"],
            "input": "Tell me a story.",
            "max_output_tokens": 4000,
            "ignore_eos": True,
            "background": True,
        }
        url = f"{gateway.url}/v1/responses"
        made = httpx.post(url, headers=gateway.headers, json=body, timeout=60)
        assert made.status_code == 200, made.text
        until(gateway, made.json()["id"], "in_progress")
        gateway.kill()
        database = sqlite3.connect(tmp_path / "tollhouse.db")
        with database:
            database.execute(LEASE_ENDS)
        database.close()
        gateway = serve(command)
        found = until(gateway, made.json()["id"], "failed")
        assert "stopped" in found["error"]["message"]
        report = audit_when_settled(command)
        assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
        usage = get(gateway, made.json()["id"])["usage"]
        database = sqlite3.connect(tmp_path / "tollhouse.db")
        rows = database.execute("select input_tokens, output_tokens from usage_events").fetchall()
        database.close()
        assert (usage["input_tokens"], usage["output_tokens"]) in rows
    finally:
        assert gateway.stop() == 0
