"""A gateway whose process stops for a while loses its connection to the engine, which ends its requests.
What the engine generated for them is billed or waived all the same, and the audit sees it."""

import os
import signal
import time
from pathlib import Path

import pytest
from sqlalchemy import text

from core.database import Database
from engine.protocol import FinishReason
from engine.receipts import read_receipts
from tests.journeys.deployments import (
    Command,
    audit_when_settled,
    free_port,
    reap,
    serve,
    start_engine,
)
from tests.journeys.test_kill import check, events_of, in_the_middle

PROTECTS = ("gateway/metering", "gateway/engines/remote.py", "engine/worker", "engine/receipts.py")
LONG = 1500  # tokens that no engine generates in the 2 s after which it misses the gateway


def aborted(receipts: Path) -> int:
    """Requests that the engine ended. Receipts of those that came to their own end, and lines that
    acknowledge a receipt, are written while the gateway stands still, too."""
    return sum(each.finish_reason is FinishReason.ABORT for each in read_receipts(receipts))


@pytest.mark.proof
def test_all_that_the_engine_generated_is_billed_or_waived(tmp_path: Path) -> None:
    place = f"tcp://127.0.0.1:{free_port()}"
    entry = f'[{{"url": "{place}", "name": "engine", "model": "tollhouse-demo"}}]'
    command = Command(tmp_path, {"TOLLHOUSE_UPSTREAMS": entry})
    engine = start_engine(command, place, "--gateway-timeout-s", "2")
    receipts = next(tmp_path.glob("receipts-*.log"))
    deployment = serve(command)
    try:

        def _stop_until_the_engine_ends_them() -> None:
            os.kill(deployment.process.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 60
            while not aborted(receipts) and time.monotonic() < deadline:
                time.sleep(0.1)
            os.kill(deployment.process.pid, signal.SIGCONT)

        seen = in_the_middle(deployment, _stop_until_the_engine_ends_them, max_tokens=LONG)
        assert aborted(receipts), "the engine ended none of them"
        assert any(each.failed for each in seen), "no client saw that its stream had ended"
        report = audit_when_settled(command)
        assert (report["lost"], report["duplicated"], report["ledger_error"]) == (0, 0, "0")
        url = f"sqlite:///{tmp_path / 'tollhouse.db'}"
        events = events_of(url)
        check(seen, events)
        database = Database(url)
        with database.read() as session:
            rows = session.execute(text("select request_id, generated_tokens from engine_receipts"))
            generated = {row[0]: row[1] for row in rows}
        database.close()
        named = [each.request_id for each in seen if each.request_id]
        assert {name: generated[name] for name in named} == {
            name: events[name]["output_tokens"] + events[name]["waived_tokens"] for name in named
        }
    finally:
        assert deployment.stop() == 0
        engine.terminate()
        reap(engine)
