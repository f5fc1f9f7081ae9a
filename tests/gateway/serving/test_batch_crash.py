"""A gateway killed with -9 right after a line's bill was written: the line is never bought again."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

from core.batches import jobs
from core.clock import SystemClock
from core.events import OpenedRequest, UsageKind
from engine.protocol import FinishReason, Receipt
from gateway.metering.recovery import event_of_receipt
from tests.gateway.deployment import Deployment, running_deployment
from tests.gateway.serving.test_batches import lines_of, many, start, wait

LINES = 6


def test_an_answer_in_the_spool_is_not_bought_again(tmp_path: Path) -> None:
    """The child dies when three lines have their bill, and the database knows of none."""
    command = [sys.executable, "-m", "tests.gateway.serving.test_batch_crash", str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL, child.stderr
    batch_id, key = child.stdout.split()
    with (
        running_deployment(tmp_path) as deployment,
        OpenAI(base_url=f"{deployment.url}/v1", api_key=key, max_retries=0) as client,
    ):
        done = wait(client, batch_id)
        assert (done.status, done.request_counts.completed) == ("completed", LINES)
        out = lines_of(client, done.output_file_id)
        told = [each["response"]["request_id"] for each in out]
        bills = _bills(deployment, batch_id, len(told))
        billed = [e["request_id"] for e in bills if e["quantity"]]
        assert sorted(billed) == sorted(told), "each line has one bill, that of its answer"
        assert len(deployment.engine.submitted) < LINES, "what was answered did not run again"
        assert done.usage.output_tokens == sum(e["output_tokens"] for e in bills) == 3 * LINES
        assert done.usage.input_tokens == sum(e["input_tokens"] for e in bills)


def test_a_line_that_the_engine_ran_for_a_dead_gateway_is_paid_by_the_operator() -> None:
    now = SystemClock().now()
    opened = OpenedRequest(
        "req_1", "org", "proj", "key", UsageKind.GENERATION, "/v1/completions", "m", None, None,
        "price_1", now, 10, batch_job="batch_1",
    )  # fmt: skip
    receipt = Receipt(
        "req_1", "org", None, 10, 0, 10, 0, 5, 5, 0, 0, FinishReason.STOP, 0.0, 0.0, 0.0
    )
    event = event_of_receipt(opened, receipt, now)
    assert (event.input_tokens, event.output_tokens, event.quantity) == (0, 0, 0)
    assert (event.waived_tokens, event.paid_by) == (5, "operator")


def test_a_line_given_back_at_a_shutdown_is_billed_once(tmp_path: Path) -> None:
    with (
        running_deployment(
            tmp_path, token_delay_s=0.1, settings={"batch_concurrency": 2}
        ) as deployment,
        OpenAI(base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0) as client,
    ):
        key = deployment.key
        batch = start(client, *many(4, tokens=8))
        wait(client, batch.id, lambda found: len(deployment.engine._running) == 2)
    with (
        running_deployment(tmp_path) as again,
        OpenAI(base_url=f"{again.url}/v1", api_key=key, max_retries=0) as client,
    ):
        done = wait(client, batch.id)
        told = {e["response"]["request_id"] for e in lines_of(client, done.output_file_id)}
        bills = _bills(again, batch.id, len(told))
        assert {e["request_id"] for e in bills if e["quantity"] or e["input_tokens"]} == told
        assert len(told) == 4


def _bills(deployment: Deployment, batch_id: str, answered: int) -> list[dict[str, Any]]:
    """The batch's usage events, once as many are billed as lines were answered: answers are saved
    without waiting for the shipper, and events of lines that ran in vain may arrive before."""
    deadline = time.monotonic() + 60
    while True:
        found = deployment.events(0, batch_job=batch_id)
        if sum(1 for e in found if e["quantity"]) >= answered:
            return found
        assert time.monotonic() < deadline, f"{found} for {answered} answers"
        time.sleep(0.05)


def _die_with_bills(directory: Path) -> None:
    """In the child: nothing is shipped, and no answer reaches the database."""
    jobs.LEASE_S = 0.3  # over before the next one starts
    with running_deployment(directory, settings={"batch_concurrency": 3}) as deployment:
        deployment.services.shipper.drain = lambda reader: None  # type: ignore[method-assign]
        plain = deployment.services.batches._save_answers

        def _note(batch_id: str, found: list[jobs.LineResult]) -> object:
            if found:
                spooled = deployment.services.spool.file.connection.execute(
                    "select count(*) from outbox where topic = 'line'"
                ).fetchone()
                assert spooled[0] >= len(found)
                sys.stdout.write(f"{batch_id} {deployment.key}")
                sys.stdout.flush()
                signal.raise_signal(signal.SIGKILL)
            return plain(batch_id, found)

        deployment.services.batches._save_answers = _note  # type: ignore[assignment, method-assign]
        with OpenAI(
            base_url=f"{deployment.url}/v1", api_key=deployment.key, max_retries=0
        ) as client:
            start(client, *many(LINES))
            _wait_for_the_end(deployment)


def _wait_for_the_end(deployment: Deployment) -> None:
    time.sleep(240)  # the caller's time-out is longer
    raise AssertionError(f"{deployment.url} was not killed")


if __name__ == "__main__":
    _die_with_bills(Path(sys.argv[1]))
