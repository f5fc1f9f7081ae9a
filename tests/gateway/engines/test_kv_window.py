"""`TOLLHOUSE_KV_WINDOW`: the answer, its header and the usage record say what context was dropped."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from core.settings import Settings
from engine.worker.options import parse
from gateway.engines.local_engines import LocalEngines
from tests.gateway.deployment import MODEL, Deployment
from tests.gateway.own_engine import deployment_on_own_engine

WINDOW = {"kv_window": 24, "kv_sinks": 3}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("window")
    with deployment_on_own_engine(folder, num_blocks=256, **WINDOW) as made:
        yield made


def test_the_settings_reach_the_process_of_a_local_engine(tmp_path: Path) -> None:
    local = LocalEngines(Settings(data_dir=tmp_path, **WINDOW))
    command = local.processes[0].options.command()
    local.stop()
    config = parse(command[command.index("engine.worker.server") + 1 :]).config
    assert {name: getattr(config, name) for name in WINDOW} == WINDOW


@pytest.mark.parametrize("count", [1, 2])
def test_an_answer_says_that_context_was_dropped(running: Deployment, count: int) -> None:
    prompts = ["The toll of the bridge is due at the gate. " * 9, "Short."][:count]
    body = {"model": MODEL, "max_tokens": 20, "ignore_eos": True, "prompt": prompts}
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
