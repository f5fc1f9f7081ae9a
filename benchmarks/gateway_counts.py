"""What a request makes the gateway do, counted and not timed: instructions of the process (by valgrind,
where it is installed), calls of Python and C functions, and bytecodes.

    python -m benchmarks.gateway_counts [--works known,new,…] [--requests 64]
    python -m benchmarks.gateway_counts --against ../other-checkout

The gateway, with all features on, runs in a process without sockets (`gateway_load/in_process.py`);
beside it runs a bare forwarder of FastAPI and aiohttp, or the gateway of another checkout. System
calls, the kernel and what runs beside requests are not counted. Neighbours on the machine change
nothing, so small differences can be told; a count is no time, though: an instruction that waits for
memory costs more than another.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gateway_load.mock import CHUNKS
from benchmarks.report import figure, progress

ROOT = Path(__file__).parents[1]
WORKS = ("known", "new", "tools", "conversation", "proxied", "stream")
_BARE_WORKS = {"proxied": "new"}
_HARNESS = ROOT / "benchmarks/gateway_load/counting.py"
Counts = dict[str, dict[str, float]]  # by work and unit


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway_counts", description=__doc__
    )
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--requests", type=int, default=64, help="counted of each work")
    parser.add_argument("--against", type=Path, help="another checkout, in place of the forwarder")
    chosen = parser.parse_args(arguments)
    works = chosen.works.split(",")
    if unknown := set(works) - set(WORKS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if chosen.against is not None:
        peer, theirs = "other checkout", counted("own", works, chosen.requests, chosen.against)
    else:
        wanted = list(dict.fromkeys(_BARE_WORKS.get(each, each) for each in works))
        found = counted("bare", wanted, chosen.requests, ROOT)
        peer, theirs = "bare", {each: found[_BARE_WORKS.get(each, each)] for each in works}
    ours = counted("own", works, chosen.requests, ROOT)
    for work in works:
        _told(work, ours[work], peer, theirs[work])
    return 0


def counted(which: str, works: list[str], requests: int, checkout: Path) -> Counts:
    """Of `own` or `bare`. Without valgrind there are no instructions."""
    progress(f"counting {which} of {checkout}")
    command = [sys.executable, str(_HARNESS), which, ",".join(works), str(requests)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = _run([*command, "calls"], checkout, environment)
    found: Counts = {line.pop("work"): line for line in map(json.loads, done.splitlines())}
    if shutil.which("valgrind") is None:
        progress("valgrind is not installed: no instructions")
        return found
    with tempfile.TemporaryDirectory() as made:
        dumps = Path(made) / "dump"
        options = ["--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={dumps}"]
        _run(["valgrind", *options, *command, "instructions"], checkout, environment)
        for number, work in enumerate(works, 1):
            total = instructions_in(Path(f"{dumps}.{number}").read_text())
            found[work]["instructions"] = total / requests
    return found


def instructions_in(dump: str) -> int:
    """Of a file that callgrind wrote. ValueError for another file."""
    found = re.search(r"^totals: (\d+)", dump, re.MULTILINE)
    if found is None:
        raise ValueError("the dump has no totals")
    return int(found[1])


def _run(command: list[str], checkout: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def _told(work: str, ours: dict[str, float], peer: str, theirs: dict[str, float]) -> None:
    units = CHUNKS if work == "stream" else 1
    name = "chunk" if work == "stream" else work
    for unit, count in ours.items():
        figure(
            f"gateway.{unit}_{name}",
            count / units,
            unit.replace("_", " "),
            False,
            peer,
            theirs[unit] / units,
        )


if __name__ == "__main__":
    raise SystemExit(main())
