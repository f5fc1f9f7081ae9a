"""CPU time of a request on two versions of our gateway, in turns: of another checkout, or on another
interpreter."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway_load.costs import Costs, Process
from benchmarks.gateway_load.own import ROOT, own_gateway
from benchmarks.gateway_load.paced import compare
from benchmarks.report import progress

_WHOLE_WORKS = ("known", "new", "tools", "conversation")
WORKS = (*_WHOLE_WORKS, "stream", "paced", "unguarded")
Version = tuple[str, dict[str, Any]]  # its name, and options of `own_gateway`


@dataclass(frozen=True, slots=True)
class Versions:
    costs: Costs
    whole: str  # address of the upstream of whole answers
    stream: str

    def against(self, checkout: Path, wanted: Container[str]) -> None:
        progress(f"CPU time of a request, beside {checkout}")
        costs, both = self.costs, {"own": ROOT, "other checkout": checkout}
        for name in ("paced", "unguarded"):
            if name in wanted:
                compare(costs.home, both, costs.rounds, costs.seconds, guarded=name == "paced")
        self._compare(("own", {}), ("other checkout", {"checkout": checkout}), wanted)

    def on_python(self, python: str, wanted: Container[str]) -> None:
        """On this interpreter, beside the running one. Not of `paced` and `unguarded`."""
        name, running = _version(python), _version(sys.executable)
        progress(f"CPU time of a request on {name}, beside {running}")
        self._compare((name, {"python": python}), (running, {}), wanted)

    def _compare(self, ours: Version, theirs: Version, wanted: Container[str]) -> None:
        if any(name in wanted for name in _WHOLE_WORKS):
            with self._both(ours, theirs, self.whole) as (own, before):
                self.costs.against(own, before, wanted)
        if "stream" in wanted:
            with self._both(ours, theirs, self.stream) as (own, before):
                self.costs.streams(own, before)

    @contextlib.contextmanager
    def _both(
        self, ours: Version, theirs: Version, upstream: str
    ) -> Iterator[tuple[Process, Process]]:
        with contextlib.ExitStack() as stack:
            pair = []
            for name, options in (ours, theirs):
                home = Path(tempfile.mkdtemp(dir=self.costs.home))
                made = stack.enter_context(own_gateway(home, upstream, **options))
                pair.append(Process(name, made.server, made.pid))
            yield pair[0], pair[1]


def _version(python: str) -> str:
    """Of an interpreter: its number, and how it was built, as `tollhouse doctor` says it."""
    said = "from gateway.cli.doctor.packages import running; print(running().says)"
    done = subprocess.run(
        [python, "-c", said], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
