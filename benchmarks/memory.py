"""Resident memory of a gateway process under requests of mixed sizes, from 100 B to 2 MB.

    python -m benchmarks.memory [--requests 20000] [--pid PID --url URL --key KEY --model MODEL]

It starts a gateway of its own with an upstream of a long context, so that also the largest prompts are
counted, screened and sent; with --pid it measures one that runs. stderr has the curve: the resident
size after each tenth of the requests, and what of it is the heap's. The aims: at most 600 MB at the
end, and flat: the last tenth no more than a twentieth above the fifth.
"""

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.gateway_load.own import MODEL, ROOT, own_gateway
from benchmarks.report import figure, processor_times, progress, stolen_since
from engine.demo.paths import MODEL_DIR

_AT_ONCE = 16
_SMALLEST, _LARGEST = 100, 2_000_000  # bytes
_LARGE_EVERY = 50  # one request in so many has any size; the others have a chat's
_CONTEXT = 2_000_000
_ROUTES = ("/v1/chat/completions", "/v1/completions")
_AIM_MB, _AIM_GROWTH = 600, 5


@dataclass(frozen=True, slots=True)
class Measured:
    url: str
    key: str
    model: str
    pid: int


def body_of(model: str, number: int) -> tuple[str, dict[str, object]]:
    """Route and body. Texts are words that no cache knows; of one size in two a stream is asked."""
    chosen = random.Random(number)
    most = _LARGEST if number % _LARGE_EVERY == 0 else 20_000
    size = int(_SMALLEST * (most / _SMALLEST) ** chosen.random())  # as many of each magnitude
    word = f"{chosen.getrandbits(32):x} "
    text = (word * (size // len(word) + 1))[:size] + " words=8"
    body = {"model": model, "max_tokens": 40, "stream": number % 2 == 0}
    if number % 3:
        chat = {"messages": [{"role": "user", "content": text}], "truncation": "disabled"}
        return _ROUTES[0], body | chat
    return _ROUTES[1], body | {"prompt": text}


def resident_mb(pid: int, name: str = "VmRSS") -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def anonymous_mb(pid: int) -> dict[str, float]:
    """Resident anonymous memory: the main heap, the other mappings of 60 MiB and more, the rest."""
    sizes = {"heap": 0.0, "large": 0.0, "small": 0.0}
    kind = None
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            fields = line.split()
            name = fields[5] if len(fields) > 5 else ""
            start, end = (int(each, 16) for each in fields[0].split("-"))
            kind = "heap" if name == "[heap]" else "large" if end - start >= 60 << 20 else "small"
            kind = None if name.startswith("/") else kind
        elif kind is not None and line.startswith("Rss:"):
            sizes[kind] += int(line.split()[1]) / 1024
    return {name: round(size) for name, size in sizes.items()}


def measure(gateway: Measured, requests: int) -> None:
    curve, statuses = [resident_mb(gateway.pid)], dict[int, int]()
    progress(f"before: {curve[0]:.0f} MB")
    headers = {"authorization": f"Bearer {gateway.key}"}
    began, stolen = time.monotonic(), processor_times()
    with (
        httpx.Client(base_url=gateway.url, headers=headers, timeout=120) as client,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):

        def _ask(number: int) -> int:
            route, body = body_of(gateway.model, number)
            try:
                return client.post(route, json=body).status_code
            except httpx.TimeoutException:
                return 0  # a busy machine; the curve goes on

        tenth = max(1, requests // 10)
        for start in range(0, requests, tenth):
            for status in pool.map(_ask, range(start, min(start + tenth, requests))):
                statuses[status] = statuses.get(status, 0) + 1
            curve.append(resident_mb(gateway.pid))
            done, parts = min(start + tenth, requests), anonymous_mb(gateway.pid)
            progress(f"after {done}: {curve[-1]:.0f} MB {parts} {statuses}")
    details = {
        "requests": requests,
        "statuses": {str(status): count for status, count in sorted(statuses.items())},
        "curve_mb": [round(each) for each in curve],
        "peak_mb": round(resident_mb(gateway.pid, "VmHWM")),
        "seconds": round(time.monotonic() - began),
        "stolen_percent": stolen_since(stolen),
    }
    end, middle = curve[-1], curve[len(curve) // 2]
    figure("memory.resident", end, "MB", False, at_least=_AIM_MB, aim=_AIM_MB, settings=details)
    growth = (end - middle) / middle * 100
    figure("memory.growth", growth, "%", False, at_least=_AIM_GROWTH, aim=0)


@contextlib.contextmanager
def own() -> Iterator[Measured]:
    command = [sys.executable, "-m", "tests.gateway.scripted_upstream"]
    upstream = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert upstream.stdout is not None
    try:
        url = f"http://127.0.0.1:{int(upstream.stdout.readline())}"
        entry = {
            "url": url,
            "name": "scripted",
            "model": MODEL,
            "tokenizer": str(MODEL_DIR),
            "context_length": _CONTEXT,
        }
        settings = {"TOLLHOUSE_UPSTREAMS": json.dumps([entry]), "TOLLHOUSE_PIN_WORKERS": "false"}
        with (
            tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as home,
            own_gateway(Path(home), url, settings=settings) as made,
        ):
            yield Measured(made.url, made.key, MODEL, made.pid)
    finally:
        upstream.terminate()
        upstream.wait(10)
        upstream.stdout.close()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="2000 take about two minutes")
    parser.add_argument("--pid", type=int, help="of a gateway process that runs")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="")
    parser.add_argument("--model", default=MODEL)
    chosen = parser.parse_args(arguments)
    if chosen.pid is not None:
        measure(Measured(chosen.url, chosen.key, chosen.model, chosen.pid), chosen.requests)
        return 0
    with own() as gateway:
        measure(gateway, chosen.requests)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
