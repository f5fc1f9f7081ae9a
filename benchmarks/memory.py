"""Resident memory of a gateway process under requests of mixed sizes, from 100 B to 2 MB.

Against a gateway that runs: `python -m benchmarks.memory URL KEY MODEL PID [REQUESTS]`. It prints the
resident size after each tenth of the requests, and the peak. The aim after 20,000 requests is at most
600 MB, and flat: the last tenth no more than a twentieth above the fifth.
"""

import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

_AT_ONCE = 16
_SMALLEST, _LARGEST = 100, 2_000_000  # bytes
_LARGE_EVERY = 50  # one request in so many has any size; the others have a chat's


def body_of(model: str, number: int) -> dict[str, object]:
    chosen = random.Random(number)
    most = _LARGEST if number % _LARGE_EVERY == 0 else 20_000
    size = int(_SMALLEST * (most / _SMALLEST) ** chosen.random())  # as many of each magnitude
    word = f"{chosen.getrandbits(32):x} "  # texts that no cache knows
    text = (word * (size // len(word) + 1))[:size]
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": 8, "truncation": "disabled"}


def resident_mb(pid: int, name: str = "VmRSS") -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def main() -> None:
    url, key, model, pid = *sys.argv[1:4], int(sys.argv[4])
    requests = int(sys.argv[5]) if len(sys.argv) > 5 else 20_000
    print(f"before: {resident_mb(pid):.0f} MB")
    statuses: dict[int, int] = {}
    headers = {"authorization": f"Bearer {key}"}
    with (
        httpx.Client(base_url=url, headers=headers, timeout=120) as client,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):

        def _ask(number: int) -> int:
            return client.post("/v1/chat/completions", json=body_of(model, number)).status_code

        tenth = max(1, requests // 10)
        for start in range(0, requests, tenth):
            for status in pool.map(_ask, range(start, min(start + tenth, requests))):
                statuses[status] = statuses.get(status, 0) + 1
            print(f"after {min(start + tenth, requests)}: {resident_mb(pid):.0f} MB", flush=True)
    print(f"peak: {resident_mb(pid, 'VmHWM'):.0f} MB; statuses: {statuses}")


if __name__ == "__main__":
    main()
