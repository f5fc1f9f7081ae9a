"""`TOLLHOUSE_KV_WINDOW`: the answer, its header and the usage record say what context was dropped."""

from collections.abc import Iterator

import httpx
import pytest

from tests.journeys.deployments import Command, RunningGateway, serve


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGateway]:
    settings = {"TOLLHOUSE_KV_WINDOW": "24", "TOLLHOUSE_KV_SINKS": "3"}
    made = serve(Command(tmp_path_factory.mktemp("window"), settings))
    yield made
    assert made.stop() == 0


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_says_that_context_was_dropped(running: RunningGateway, count: int) -> None:
    prompts = ["The toll of the bridge is due at the gate. " * 9, "Short."][:count]
    body = {"model": "tollhouse-demo", "max_tokens": 20, "ignore_eos": True, "prompt": prompts}
    answer = httpx.post(
        f"{running.url}/v1/completions", headers=running.headers, json=body, timeout=120
    )
    answer.raise_for_status()
    short = httpx.post(
        f"{running.url}/v1/completions", headers=running.headers, timeout=120,
        json={**body, "prompt": "Short.", "max_tokens": 2},
    )  # fmt: skip
    usage = answer.json()["usage"]
    # All but the last token of each choice are read; 27 positions are seen at once.
    dropped = usage["prompt_tokens"] + usage["completion_tokens"] - count - 27
    if count == 1:
        assert answer.headers["x-tollhouse-truncation"] == f"tokens={dropped}"
    else:  # the short one dropped nothing
        found = int(answer.headers["x-tollhouse-truncation"].removeprefix("tokens="))
        assert 0 < found <= usage["prompt_tokens"] + 20 - 27
    assert "x-tollhouse-truncation" not in short.headers
