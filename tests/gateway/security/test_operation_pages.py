"""Figures and the parts of the deployment are not public with TOLLHOUSE_METRICS_TOKEN, and not on the
public address with TOLLHOUSE_METRICS_LISTEN; `tollhouse serve` starts with either."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from core.errors import SettingError
from core.settings import load_settings
from tests.conftest import REDIS, need_redis
from tests.gateway.deployment import running_deployment
from tests.gateway.fake_upstream import upstream
from tests.migrated import migrated

PROTECTS = (
    "gateway/edge/own_metrics.py",
    "gateway/edge/listening.py",
    "gateway/serving/api/health.py",
)
ROOT = Path(__file__).parents[3]
TOKEN = "a token of the operator's"
ADMIN = "an-operator-of-sixteen"
MODEL = "theirs"


def read(url: str, token: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return httpx.get(url, headers=headers, timeout=30)


def test_metrics_and_the_parts_of_readiness_need_the_token(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    with running_deployment(folder, settings={"metrics_token": TOKEN}) as deployment:
        for wrong in ("", "wrong", deployment.key):
            assert read(f"{deployment.url}/metrics", wrong).status_code == 401
            ready = read(f"{deployment.url}/readyz", wrong)
            assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        for right in (TOKEN, deployment.services.operator_token):
            assert "tollhouse_" in read(f"{deployment.url}/metrics", right).text
            assert read(f"{deployment.url}/readyz", right).json()["parts"]


@contextmanager
def served(folder: Path, **settings: str) -> Iterator[str]:
    """The URL of `tollhouse serve`."""
    migrated(f"sqlite:///{folder}/tollhouse.db").close()  # test_serve.py starts from nothing
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TOLLHOUSE_")}
    with upstream() as server:
        answer = {"message": {"content": "Hello."}, "index": 0, "finish_reason": "stop"}
        server.answers["/v1/chat/completions"] = {"choices": [answer]}
        named = {
            "TOLLHOUSE_DATA_DIR": str(folder),
            "TOLLHOUSE_PORT": "0",
            "TOLLHOUSE_ADMIN_TOKEN": ADMIN,
            "TOLLHOUSE_DRAIN_TIMEOUT_S": "1",
            "TOLLHOUSE_UPSTREAMS": json.dumps([{"url": server.url, "model": MODEL}]),
            **settings,
        }
        command = [sys.executable, "-m", "gateway.cli.main", "serve"]
        process = subprocess.Popen(
            command, cwd=ROOT, env=kept | named, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline() or "null")["url"]
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.proof)])
def test_another_address_alone_serves_them(tmp_path: Path, workers: str) -> None:
    beside = f"127.0.0.1:{free_port()}"
    named = {"TOLLHOUSE_METRICS_LISTEN": beside, "TOLLHOUSE_WORKERS": workers}
    if workers != "1":
        need_redis()
        named["TOLLHOUSE_REDIS_URL"] = REDIS
    with served(tmp_path, **named, TOLLHOUSE_METRICS_TOKEN=TOKEN) as url:
        for token in ("", TOKEN, (tmp_path / "demo-key").read_text().strip()):
            assert read(f"{url}/metrics", token).status_code == 404
            ready = read(f"{url}/readyz", token)
            assert (ready.status_code, ready.json()) == (200, {"status": "ready"})
        assert read(f"{url}/readyz", ADMIN).json()["parts"]
        assert read(f"http://{beside}/metrics").status_code == 401
        assert "tollhouse_" in read(f"http://{beside}/metrics", TOKEN).text
        assert read(f"http://{beside}/readyz", TOKEN).json()["parts"]
        assert read(f"http://{beside}/healthz").json() == {"status": "ok"}
        for path in ("/v1/models", "/admin/v1/keys", "/dashboard/", "/docs", "/openapi.json", "/"):
            assert read(f"http://{beside}{path}", ADMIN).status_code == 404


@pytest.mark.parametrize("wrong", ["9102", ":9102", "here:", "::1:9102", "[::1]", "a:99999", "a:x"])
def test_an_address_that_is_none_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    monkeypatch.setenv("TOLLHOUSE_METRICS_LISTEN", wrong)
    with pytest.raises(SettingError, match="TOLLHOUSE_METRICS_LISTEN"):
        load_settings()


@pytest.mark.parametrize(
    ("given", "address"),
    [("", None), ("0.0.0.0:9102", ("0.0.0.0", 9102)), ("[::1]:0", ("::1", 0))],
)
def test_an_address_is_a_host_and_a_port(
    monkeypatch: pytest.MonkeyPatch, given: str, address: tuple[str, int] | None
) -> None:
    monkeypatch.setenv("TOLLHOUSE_METRICS_LISTEN", given)
    assert load_settings().metrics_address == address
