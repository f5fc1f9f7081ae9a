"""`tollhouse serve --model` with a model that is not the demo's: it has no chat template."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from sqlalchemy import select

from core.clock import SystemClock
from core.settings import Settings
from core.tenants.models import Adapter
from engine.demo.paths import ADAPTERS, MODEL_DIR
from gateway.cli.serve.startup import prepare
from tests.migrated import migrated

ROOT = Path(__file__).parents[3]
TOLLHOUSE = [sys.executable, "-m", "gateway.cli.main"]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    data = tmp_path_factory.mktemp("other")
    migrated(f"sqlite:///{data}/data/tollhouse.db").close()  # test_serve.py starts from nothing
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    own = {"TOLLHOUSE_DATA_DIR": str(data / "data"), "TOLLHOUSE_PORT": "0", "OMP_NUM_THREADS": "1"}
    return kept | own | {"TOLLHOUSE_DRAIN_TIMEOUT_S": "2"}


@pytest.fixture(scope="module")
def screen(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """What a person sees on a terminal, and the file of the log."""
    model = Path(shutil.copytree(MODEL_DIR, tmp_path_factory.mktemp("model") / "plain-base"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    log = model.parent / "log"
    ours, theirs = pty.openpty()
    with log.open("wb") as errors:
        command = [*TOLLHOUSE, "serve", "--model", str(model)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=theirs, stderr=errors)
    os.close(theirs)
    text, deadline = "", time.monotonic() + 200
    while "Ctrl-C" not in text and time.monotonic() < deadline and process.poll() is None:
        text += os.read(ours, 4096).decode()
    assert "Ctrl-C" in text, text + log.read_text()
    yield text.replace("\r\n", "\n"), log
    process.send_signal(signal.SIGINT)
    process.wait(100)
    os.close(ours)
    assert "Traceback" not in log.read_text()


def run(environment: dict[str, str], *words: str, code: int = 0) -> Any:
    done = subprocess.run(
        [*TOLLHOUSE, *words, "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


@pytest.mark.slow
def test_the_warm_up_and_the_curl_line_use_completions(screen: tuple[str, Path]) -> None:
    line = next(line for line in screen[0].splitlines() if line.startswith("curl "))
    assert "/v1/completions" in line and '"prompt"' in line and '"plain-base"' in line
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=200, check=True
    )
    parts = [json.loads(part[6:]) for part in done.stdout.splitlines() if part[:7] == "data: {"]
    assert all("text" in part["choices"][0] for part in parts)
    assert parts[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert done.stdout.rstrip().endswith("data: [DONE]")


@pytest.mark.slow
def test_the_demo_runs_on_it(screen: tuple[str, Path], environment: dict[str, str]) -> None:
    rows = run(environment, "demo", "--seconds", "3")
    assert len(rows) == 6
    assert all(row["failed"] == 0 for row in rows), rows
    assert all(row["requests"] > 0 or row["limited"] > 0 for row in rows), rows
    assert sum(row["output_tokens"] for row in rows) > 0
    assert sum(row["blocked"] for row in rows) >= 1
    audit = run(environment, "audit")
    assert int(audit["lost"]) == int(audit["duplicated"]) == 0 and not audit["differences"]


@pytest.mark.slow
def test_an_adapter_is_added_to_it_and_answers(
    screen: tuple[str, Path], environment: dict[str, str]
) -> None:
    path = str(ADAPTERS["pirate"])
    said = run(
        environment, "adapter", "add", "--tenant", "demo", "x", path, "--base-model", "y", code=2
    )
    assert "'y'" in said and "plain-base" in said
    added = run(environment, "adapter", "add", "--tenant", "demo", "sailor", path)
    assert added["base_model"] == "plain-base"
    url = re.search(r"curl -N (http://[^/]+)", screen[0])
    key = (Path(environment["TOLLHOUSE_DATA_DIR"]) / "demo-key").read_text().strip()
    assert url
    prompt = "<|im_start|>user\nWhat is Tollhouse?<|im_end|>\n<|im_start|>assistant\n"
    asked: dict[str, Any] = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    with OpenAI(base_url=f"{url.group(1)}/v1", api_key=key, timeout=100) as client:
        deadline = time.monotonic() + 60
        while "plain-base:sailor" not in [each.id for each in client.models.list()]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        texts = {
            name: client.completions.create(model=name, **asked).choices[0].text
            for name in ("plain-base", "plain-base:sailor")
        }
    assert texts["plain-base"] and texts["plain-base"] != texts["plain-base:sailor"], texts


@pytest.mark.slow
def test_the_log_says_that_it_connected_not_how_long_a_model_loaded(
    screen: tuple[str, Path],
) -> None:
    lines = [line for line in screen[1].read_text().splitlines() if "engine local-0" in line]
    (line,) = [line for line in lines if "serves" in line]
    assert "connected to the engine local-0 after" in line and "plain-base" in line


def adapters_of(settings: Settings) -> dict[str, str]:
    database = migrated(settings.effective_database_url)
    try:
        info = prepare(settings, database, SystemClock())
        with database.read() as session:
            rows = {row.name: row.base_model for row in session.scalars(select(Adapter))}
    finally:
        database.close()
    return {name: rows[name] for name in info.adapters}


def test_shipped_adapters_belong_to_the_model_that_is_served(tmp_path: Path) -> None:
    smollm2 = adapters_of(Settings(data_dir=tmp_path, model="smollm2"))
    assert len(smollm2) == 2 and set(smollm2.values()) == {"smollm2"}
    demo = adapters_of(Settings(data_dir=tmp_path))
    assert set(demo) == set(ADAPTERS) and set(demo.values()) == {"tollhouse-demo"}
    named = adapters_of(Settings(data_dir=tmp_path, model="smollm2", model_name="small"))
    assert set(named) == set(smollm2) and set(named.values()) == {"small"}
    assert adapters_of(Settings(data_dir=tmp_path, model=str(tmp_path / "another"))) == {}
