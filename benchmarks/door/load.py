"""The load: wrk, which costs little, with one body and key."""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3}
_LUA = """
wrk.method = "POST"
wrk.path = "/v1/chat/completions"
wrk.headers["Content-Type"] = "application/json"
wrk.headers["Authorization"] = "Bearer {key}"
wrk.body = [==[{body}]==]
"""


@dataclass(frozen=True, slots=True)
class Rate:
    per_s: float
    p50_ms: float
    failed: int  # answers that were not 2xx, and broken connections


def run_wrk(
    home: Path, url: str, key: str, *, connections: int, seconds: float, stream: bool, model: str
) -> Rate:
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed: it makes the load of this benchmark")
    body = {
        "model": model,
        "stream": stream,
        "messages": [{"role": "user", "content": "What is a toll, and who pays it at the door?"}],
    }
    script = home / "load.lua"
    script.write_text(_LUA.format(key=key, body=json.dumps(body)))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds:.0f}s", "--timeout", "30s"]
    done = subprocess.run(
        [*command, "--latency", "-s", str(script), url],
        capture_output=True,
        text=True,
        timeout=seconds + 60,
        check=True,
    )
    return _read(done.stdout)


def _read(said: str) -> Rate:
    rate = re.search(r"Requests/sec:\s+([\d.]+)", said)
    half = re.search(r"50%\s+([\d.]+)(us|ms|s)", said)
    failed = re.search(r"Non-2xx or 3xx responses: (\d+)", said)
    broken = re.search(
        r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", said
    )
    if rate is None or half is None:
        raise SystemExit(f"wrk said what cannot be read:\n{said}")
    count = int(failed.group(1)) if failed else 0
    count += sum(map(int, broken.groups())) if broken else 0
    return Rate(float(rate.group(1)), float(half.group(1)) * _UNITS[half.group(2)], count)
