"""The peers, each in an environment that is made for it outside the repository."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.door.mock import free_port, wait_for_port
from benchmarks.report import progress

ROOT = Path(__file__).parents[2]
# Stands in for TensorZero's own start: its embedded gateway as an OpenAI server.
_TENSORZERO = """
import asyncio, sys
from openai import AsyncOpenAI
from tensorzero import patch_openai_client
async def main():
    client = AsyncOpenAI(api_key="none")
    client = await patch_openai_client(client, config_file=sys.argv[1], async_setup=True)
    print(client.base_url, flush=True)
    await asyncio.sleep(1e6)
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Peer:
    url: str
    model: str


def environment_home() -> Path:
    return Path(os.environ.get("TOLLHOUSE_BENCH_HOME", "~/.cache/tollhouse-bench")).expanduser()


def _venv(name: str, *packages: str) -> Path:
    """A virtual environment with the packages, made once."""
    place = environment_home() / name
    if not (place / ".installed").exists():
        progress(f"installing {name}")
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, timeout=300)
        pip = [str(place / "bin/pip"), "install", "-q", *packages]
        subprocess.run(pip, check=True, timeout=1800)
        (place / ".installed").touch()
    return place / "bin"


@contextlib.contextmanager
def litellm(home: Path, upstream: str) -> Iterator[Peer]:
    binary = _venv("litellm", "litellm[proxy]") / "litellm"
    config = home / "litellm.yaml"
    config.write_text(
        "model_list:\n- model_name: mock\n  litellm_params:\n    model: openai/mock\n"
        f"    api_base: {upstream}/v1\n    api_key: none\n"
    )
    port = free_port()
    command = [str(binary), "--config", str(config), "--port", str(port), "--num_workers", "1"]
    with _running(command, port):
        yield Peer(f"http://127.0.0.1:{port}", "mock")


@contextlib.contextmanager
def portkey(home: Path, upstream: str) -> Iterator[Peer]:
    place = environment_home() / "portkey"
    entry = place / "node_modules/@portkey-ai/gateway/build/start-server.js"
    if not entry.exists():
        progress("installing portkey")
        place.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--prefix", str(place), "@portkey-ai/gateway"]
        subprocess.run(install, check=True, timeout=900)
    port = free_port()
    with _running(["node", str(entry), f"--port={port}", "--headless"], port):
        yield Peer(f"http://127.0.0.1:{port}", "mock")


@contextlib.contextmanager
def bare(home: Path, upstream: str) -> Iterator[Peer]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.door.forwarder:app"]
    command += ["--port", str(port), "--log-level", "error", "--loop", "uvloop"]
    with _running(command, port, {"UPSTREAM": upstream}):
        yield Peer(f"http://127.0.0.1:{port}", "mock")


@contextlib.contextmanager
def tensorzero(home: Path, upstream: str) -> Iterator[Peer]:
    binary = _venv("tensorzero", "tensorzero", "openai") / "python"
    config = home / "tensorzero.toml"
    config.write_text(
        "[gateway]\nobservability.enabled = false\n"
        '[models.mock]\nrouting = ["mock"]\n[models.mock.providers.mock]\n'
        f'type = "openai"\nmodel_name = "mock"\napi_base = "{upstream}/v1"\n'
        'api_key_location = "none"\n'
    )
    process = subprocess.Popen(
        [str(binary), "-c", _TENSORZERO, str(config)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        base = process.stdout.readline().strip()
        if not base:
            raise RuntimeError("tensorzero did not start")
        yield Peer(base.rstrip("/"), "tensorzero::model_name::mock")
    finally:
        process.kill()
        process.communicate(timeout=10)


@contextlib.contextmanager
def _running(command: list[str], port: int, extra: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(extra or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_port(port, 120)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


PEERS: dict[str, Callable[[Path, str], "contextlib.AbstractContextManager[Peer]"]] = {
    "bare": bare,
    "litellm": litellm,
    "portkey": portkey,
    "tensorzero": tensorzero,
}
