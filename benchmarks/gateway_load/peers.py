"""The peers, each in an environment that is made for it outside the repository."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.gateway_load.load import Server
from benchmarks.gateway_load.mock import free_port, wait_for_port
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
    print("listening", client.base_url, flush=True)
    await asyncio.sleep(1e6)
asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Peer:
    """`whole` answers whole, `stream` in a stream: their upstreams are two."""

    whole: Server
    stream: Server | None = None
    pid: int = 0  # of the process that serves, where it is one


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
def litellm(home: Path, whole: str, stream: str) -> Iterator[Peer]:
    binary = _venv("litellm", "litellm[proxy]") / "litellm"
    config = home / "litellm.yaml"
    lines = ["model_list:"]
    for name, upstream in (("mock", whole), ("mock-stream", stream)):
        lines += [f"- model_name: {name}", "  litellm_params:", "    model: openai/mock"]
        lines += [f"    api_base: {upstream}/v1", "    api_key: none"]
    config.write_text("\n".join(lines) + "\n")
    port = free_port()
    command = [str(binary), "--config", str(config), "--port", str(port), "--num_workers", "1"]
    extra = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        # No key is checked: that is in its favour.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with _running(command, port, extra, home / "litellm.log"):
        url = f"http://127.0.0.1:{port}"
        yield Peer(Server(url, "mock"), Server(url, "mock-stream"))


@contextlib.contextmanager
def portkey(home: Path, whole: str, stream: str) -> Iterator[Peer]:
    place = environment_home() / "portkey"
    entry = place / "node_modules/@portkey-ai/gateway/build/start-server.js"
    if not entry.exists():
        progress("installing portkey")
        place.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--silent", "--prefix", str(place), "@portkey-ai/gateway"]
        subprocess.run(install, check=True, timeout=900)
    port = free_port()
    # Without a configuration it takes provider and address from each request's headers.
    headers = {"x-portkey-provider": "openai", "x-portkey-custom-host": f"{whole}/v1"}
    command = ["node", str(entry), f"--port={port}", "--headless"]
    with _running(command, port, None, home / "portkey.log"):
        yield Peer(Server(f"http://127.0.0.1:{port}", "mock", headers=headers))


@contextlib.contextmanager
def bare(home: Path, whole: str, stream: str) -> Iterator[Peer]:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "benchmarks.gateway_load.forwarder:app"]
    command += ["--port", str(port), "--log-level", "error", "--loop", "uvloop"]
    with _running(command, port, {"UPSTREAM": whole}, home / "bare.log") as pid:
        yield Peer(Server(f"http://127.0.0.1:{port}", "mock"), pid=pid)


@contextlib.contextmanager
def tensorzero(home: Path, whole: str, stream: str) -> Iterator[Peer]:
    binary = _venv("tensorzero", "tensorzero", "openai") / "python"
    config = home / "tensorzero.toml"
    config.write_text(
        "[gateway]\nobservability.enabled = false\n"
        '[models.mock]\nrouting = ["mock"]\n[models.mock.providers.mock]\n'
        f'type = "openai"\nmodel_name = "mock"\napi_base = "{whole}/v1"\n'
        'api_key_location = "none"\n'
    )
    log = home / "tensorzero.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [str(binary), "-c", _TENSORZERO, str(config)], stdout=said, stderr=said
        )
    try:
        base = urlsplit(_told(log, "listening ", process, 60))
        model = "tensorzero::model_name::mock"
        path = f"{base.path.rstrip('/')}/chat/completions"
        yield Peer(Server(f"{base.scheme}://{base.netloc}", model, path=path))
    finally:
        process.kill()
        process.wait(10)


def _told(log: Path, mark: str, process: "subprocess.Popen[bytes]", timeout_s: float) -> str:
    """What follows the mark in a process's log, once it is there."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith(mark):
                return line.removeprefix(mark).strip()
        time.sleep(0.1)
    raise RuntimeError(f"it did not start: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-600:]


@contextlib.contextmanager
def _running(
    command: list[str], port: int, extra: dict[str, str] | None, log: Path
) -> Iterator[int]:
    """The process id, once it listens: up to 180 s, for some import half of what is installed first."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(extra or {})},
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        try:
            wait_for_port(port, 180, process)
        except OSError:
            raise RuntimeError(f"it did not start: {_tail(log)}") from None
        yield process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


PEERS: dict[str, Callable[[Path, str, str], "contextlib.AbstractContextManager[Peer]"]] = {
    "bare": bare,
    "litellm": litellm,
    "portkey": portkey,
    "tensorzero": tensorzero,
}
