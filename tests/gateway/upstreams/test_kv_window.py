"""`TOLLHOUSE_KV_WINDOW`: the answer, its header and the usage record say what context was dropped."""

from pathlib import Path

import httpx
import pytest

from tests.journeys.deployments import Command, serve


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_says_that_context_was_dropped(tmp_path: Path, count: int) -> None:
    settings = {"TOLLHOUSE_KV_WINDOW": "24", "TOLLHOUSE_KV_SINKS": "3"}
    running = serve(Command(tmp_path, settings))
    prompts = ["The toll of the bridge is due at the gate. " * 9, "Short."][:count]
    body = {"model": "tollhouse-demo", "max_tokens": 20, "ignore_eos": True, "prompt": prompts}
    try:
        answer = httpx.post(
            f"{running.url}/v1/completions", headers=running.headers, json=body, timeout=120
        )
        answer.raise_for_status()
        short = httpx.post(
            f"{running.url}/v1/completions", headers=running.headers, timeout=120,
            json={**body, "prompt": "Short.", "max_tokens": 2},
        )  # fmt: skip
    finally:
        assert running.stop() == 0
    usage = answer.json()["usage"]
    # All but the last token of each choice are read; 27 positions are seen at once.
    dropped = usage["prompt_tokens"] + usage["completion_tokens"] - count - 27
    if count == 1:
        assert answer.headers["x-tollhouse-truncation"] == f"tokens={dropped}"
    else:  # the short one dropped nothing
        found = int(answer.headers["x-tollhouse-truncation"].removeprefix("tokens="))
        assert 0 < found <= usage["prompt_tokens"] + 20 - 27
    assert "x-tollhouse-truncation" not in short.headers
