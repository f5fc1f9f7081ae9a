"""The server that receives the demo's traffic: a running one, or one started for the demo."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.error import URLError

from core.errors import Unavailable
from core.settings import Settings
from gateway.serving.record import read_record

START_S = 180


@contextmanager
def running_server(settings: Settings) -> Iterator[str]:
    """Yield the server's URL. A server that was started here is stopped gracefully."""
    record = read_record(settings.data_dir)
    candidates = [record.url] if record is not None and record.is_live else []
    for url in (*candidates, f"http://127.0.0.1:{settings.port}"):
        if _is_ready(url):
            yield url
            return
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli.main", "serve"],
        env={**os.environ, "TOLLHOUSE_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    kill_timer = threading.Timer(START_S, process.kill)
    kill_timer.start()
    try:
        yield _url_of(process)
    finally:
        kill_timer.cancel()
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _url_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return str(json.loads(line)["url"])
    raise Unavailable(
        "The server for the demo did not start.",
        next_step="Run `tollhouse serve` to see why, then run the demo again.",
    )


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False
