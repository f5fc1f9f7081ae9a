"""What a request costs a server: CPU time of its process, and instructions where the machine counts
them. They do not drift with what the neighbours of a shared machine do, as requests a second do.

The works are those that differ for a gateway: prompts that are new each time, the next turn of a
conversation of 20,000 characters, tools, a proxy in front, streams of 100 chunks.
"""

import contextlib
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gateway_load.load import NEW, Server, bodies, check, run_wrk
from benchmarks.gateway_load.mock import CHUNKS, STREAM_TEXT, WHOLE_TEXT
from benchmarks.report import figure, median_pair, processor_times, progress, stolen_since

_CONNECTIONS = 16
_CONVERSATION = 20_000  # characters
_SCHED_CLOCK = 2  # Linux: the clock of a process is (~pid << 3) | 2 (clock_getcpuclockid)
Message = dict[str, str]
_FORWARDED = {"X-Forwarded-For": "203.0.113.9", "X-Forwarded-Proto": "https"}


@dataclass(frozen=True, slots=True)
class Spent:
    """By one request, over one load."""

    cpu_us: float
    instructions: float | None  # None where the machine does not count them
    per_s: float


@dataclass(slots=True)
class Process:
    """A server under load; `pid` is of the process that serves."""

    name: str
    server: Server
    pid: int
    spent: list[Spent | None] = field(default_factory=list)  # one a round

    def load(self, home: Path, lines: list[str], seconds: float, *, stream: bool) -> Spent | None:
        before = cpu_s(self.pid)
        try:
            with _counted(self.pid) as instructions:
                rate = run_wrk(
                    home,
                    self.server,
                    connections=_CONNECTIONS,
                    seconds=seconds,
                    stream=stream,
                    lines=lines,
                )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            progress(f"  {self.name}: NO FIGURE: {error}")
            return None
        if rate.failed or not rate.answers:
            progress(f"  {self.name}: {rate}: NO ANSWER, OR SOME FAILED: NO FIGURE")
            return None
        counted = instructions()
        return Spent(
            (cpu_s(self.pid) - before) / rate.answers * 1e6,
            None if counted is None else counted / rate.answers,
            rate.per_s,
        )


def cpu_s(pid: int) -> float:
    """User and system time of a process so far, all threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | _SCHED_CLOCK)


@contextlib.contextmanager
def _counted(pid: int) -> Iterator[Callable[[], float | None]]:
    """`perf stat` on a process for a while; then what it counted, None where it cannot."""
    said: list[str] = []
    if shutil.which("perf") is None:
        yield lambda: None
        return
    command = ["perf", "stat", "-x,", "-e", "instructions", "-p", str(pid)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        yield lambda: instructions_in(said[0] if said else "")
    finally:
        process.send_signal(signal.SIGINT)
        said.append(process.communicate(timeout=30)[1])


def instructions_in(said: str) -> float | None:
    """Of `perf stat -x,`: the number in the first field; None for `<not supported>` and errors."""
    found = re.search(r"^(\d+),[^,]*,instructions", said, re.MULTILINE)
    return float(found.group(1)) if found else None


def works(model: str) -> dict[str, list[str]]:
    """The bodies of each work; NEW is replaced by a number that is new with every request."""
    known = bodies(model, stream=False)
    asked = [str(json.loads(line)["messages"][0]["content"]) for line in known]
    new = [{"role": "user", "content": f"Case {NEW}: {text}"} for text in asked]
    before = _turns()
    return {
        "known": known,
        "new": [_body(model, [last]) for last in new],
        "conversation": [_body(model, [*before, last]) for last in new[:8]],
        "tools": [_body(model, [last], tools=_TOOLS) for last in new],
    }


def _body(model: str, messages: list[Message], **fields: object) -> str:
    return json.dumps({"model": model, "stream": False, "messages": messages, **fields})


def _turns() -> list[Message]:
    """The turns before the last one, the same in each request, as in a conversation that goes on."""
    passage, turns, length = STREAM_TEXT.strip(), list[Message](), 0
    while length < _CONVERSATION or len(turns) % 2:
        text = f"{len(turns)}. {passage}"
        turns.append({"role": ("user", "assistant")[len(turns) % 2], "content": text})
        length += len(text)
    return turns


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"{verb}_{thing}",
            "description": f"To {verb} a {thing} by its name, and tell what became of it.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["name"],
            },
        },
    }
    for verb in ("open", "close", "find")
    for thing in ("gate", "ledger")
]


@dataclass(frozen=True, slots=True)
class Costs:
    home: Path
    rounds: int
    seconds: float

    def whole(self, own: Process, bare: Process | None) -> None:
        """Every work of whole answers, ours beside a bare forwarder's."""
        for name, lines in works(own.server.model).items():
            least, aim = (0.4, 0.7) if name == "conversation" else (0.6, 0.9)
            self._compare(f"gateway.cpu_{name}", lines, own, bare, least=least, aim=aim)

    def against(self, own: Process, before: Process, wanted: Container[str]) -> None:
        """The wanted works of whole answers, ours beside another version's."""
        for name, lines in works(own.server.model).items():
            if name in wanted:
                self._compare(f"gateway.cpu_{name}", lines, own, before)

    def proxied(self, own: Process) -> None:
        """Ours behind a proxy that it trusts, beside itself without one."""
        behind = replace(own, name="behind a proxy", spent=[])
        behind.server = replace(own.server, headers={**own.server.headers, **_FORWARDED})
        lines = works(own.server.model)["new"]
        self._compare("gateway.cpu_proxied", lines, behind, own, least=0.9, aim=0.98)

    def streams(self, own: Process, before: Process | None = None) -> None:
        lines = bodies(own.server.model, stream=True)
        self._compare("gateway.cpu_chunk", lines, own, before, stream=True, units=CHUNKS)

    def _compare(
        self,
        name: str,
        lines: list[str],
        own: Process,
        peer: Process | None,
        *,
        stream: bool = False,
        units: int = 1,
        least: float | None = None,
        aim: float | None = None,
    ) -> None:
        """In turn, round after round; the figure is that of the round with the median ratio."""
        able = [each for each in (own, peer) if each is not None]
        for each in able:
            each.spent = []
            expected = STREAM_TEXT if stream else WHOLE_TEXT
            check(each.server, expected, stream=stream, body=lines[0].replace(NEW, "0"))
            each.load(self.home, lines, self.seconds, stream=stream)
        before = processor_times()
        for number in range(self.rounds):
            for each in able if number % 2 else reversed(able):
                each.spent.append(each.load(self.home, lines, self.seconds, stream=stream))
        found = median_pair(_cpu(own), _cpu(peer) if peer is not None else [])
        if found is None:
            return
        theirs = None if found[1] is None else found[1] / units
        settings: dict[str, Any] = {"rounds": self.rounds, "stolen_percent": stolen_since(before)}
        for each in able:
            settings[each.name] = _told(each, units)
        figure(
            name,
            found[0] / units,
            "us",
            False,
            peer.name if peer is not None else None,
            theirs,
            at_least=least,
            aim=aim,
            settings=settings,
        )


def _cpu(process: Process) -> list[float | None]:
    return [None if each is None else each.cpu_us for each in process.spent]


def _told(process: Process, units: int) -> dict[str, float]:
    """Medians: instructions, where they were counted, and requests a second."""
    known = [each for each in process.spent if each is not None]
    counted = [each.instructions / units for each in known if each.instructions is not None]
    told: dict[str, float] = {}
    if known:
        told["per_s"] = round(median([each.per_s for each in known]))
    if counted:
        told["instructions"] = round(median(counted))
    return told
