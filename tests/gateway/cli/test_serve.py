"""`tollhouse serve` as a newcomer meets it: the ready line, the printed curl line, a port in use."""

import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from engine.demo.paths import ADAPTERS
from tests.journeys import test_scraped_metrics as scraped_metrics

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "gateway.cli.main", "serve"]
pytestmark = pytest.mark.slow


def environment(data_dir: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    own = {"TOLLHOUSE_DATA_DIR": str(data_dir), "TOLLHOUSE_PORT": "0", "OMP_NUM_THREADS": "1"}
    return kept | own | {"TOLLHOUSE_DRAIN_TIMEOUT_S": "2"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def screen(data_dir: Path) -> Iterator[str]:
    """What a person sees on a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        COMMAND,
        cwd=ROOT,
        env=environment(data_dir),
        stdout=theirs,
        stderr=subprocess.PIPE,
        umask=0,
    )
    os.close(theirs)
    text, deadline = "", time.monotonic() + 200
    while "Ctrl-C" not in text and time.monotonic() < deadline and process.poll() is None:
        text += os.read(ours, 4096).decode()
    assert "Ctrl-C" in text, text + (process.stderr.read().decode() if process.stderr else "")
    yield text.replace("\r\n", "\n")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    os.close(ours)
    assert process.returncode == 0
    assert "Traceback" not in errors.decode()


def test_the_printed_curl_line_reads_a_stream_back(screen: str) -> None:
    line = next(line for line in screen.splitlines() if line.startswith("curl "))
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=200, check=True
    )
    chunks = [
        json.loads(part[6:]) for part in done.stdout.splitlines() if part.startswith("data: {")
    ]
    said = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert "Tollhouse" in said
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_the_screen_says_what_is_served_where_and_one_line_to_paste(
    screen: str, data_dir: Path
) -> None:
    assert len([line for line in screen.splitlines() if line.startswith("curl ")]) == 1
    assert re.search(r"^  serving    tollhouse-demo at http://127\.0\.0\.1:\d+/v1", screen, re.M)
    assert str(data_dir / "demo-key") in screen and "tollhouse-demo:pirate" in screen


def test_the_page_names_live_addresses_and_metrics_are_those_of_boards_and_alerts(
    screen: str,
) -> None:
    for name in ("docs", "metrics"):
        found = re.search(rf"^  {name} +(http\S+)$", screen, re.MULTILINE)
        assert found
        answer = httpx.get(found.group(1), timeout=60)
        assert answer.status_code == 200
    scraped_metrics.check(answer.text, engines=1, shared=False)


def test_the_demo_key_is_in_a_private_file_and_opens_every_demo_model(
    screen: str, data_dir: Path
) -> None:
    file = data_dir / "demo-key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert key in screen
    url = re.search(r"curl -N (http://[^/]+)", screen)
    assert url
    with OpenAI(base_url=f"{url.group(1)}/v1", api_key=key, timeout=200) as client:
        names = [model.id for model in client.models.list()]
        assert names[0] == "tollhouse-demo" and "tollhouse-demo:pirate" in names
        said = {
            name: client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": "What is Tollhouse?"}],
                temperature=0,
                max_tokens=200,
            )
            .choices[0]
            .message.content
            for name in names
        }
    assert len(set(said.values())) == len(names), said


def test_every_file_is_for_its_user_alone_whatever_the_umask(screen: str, data_dir: Path) -> None:
    """Also what is made after the start: the files of a request, the spool, an engine's receipts, and an
    adapter that a command adds."""
    added = [*COMMAND[:-1], "adapter", "add", "copied", str(ADAPTERS["json"]), "--tenant", "demo"]
    subprocess.run(
        added, cwd=ROOT, env=environment(data_dir), umask=0, check=True, capture_output=True
    )
    line = next(line for line in screen.splitlines() if line.startswith("curl "))
    subprocess.run(["bash", "-c", line], capture_output=True, timeout=200, check=True)
    modes = {
        str(each.relative_to(data_dir)): stat.S_IMODE(each.stat().st_mode)
        for each in (data_dir, *data_dir.rglob("*"))
    }
    assert {name.split("/")[0] for name in modes} >= {
        "spool",
        "receipts",
        "adapters",
        "tollhouse.db",
    }
    assert not {name: oct(mode) for name, mode in modes.items() if mode & 0o077}


def test_a_taken_port_is_named_with_another_to_take(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*COMMAND, "--port", str(port)],
            cwd=ROOT,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert done.returncode == 2
    assert f"Port {port}" in done.stderr and f"--port {port + 1}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("TOLLHOUSE_WORKERS", "many", "TOLLHOUSE_WORKERS"),
        ("TOLLHOUSE_MODEL", "/nowhere/at/all", "TOLLHOUSE_MODEL"),
        ("TOLLHOUSE_UPSTREAMS", "gopher://x", "TOLLHOUSE_UPSTREAMS"),
        ("TOLLHOUSE_WORKERS", "2", "TOLLHOUSE_REDIS_URL"),
    ],
)
def test_a_wrong_setting_stops_the_start_and_is_named(
    tmp_path: Path, setting: str, value: str, named: str
) -> None:
    done = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=environment(tmp_path) | {setting: value},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr and "Traceback" not in done.stderr
