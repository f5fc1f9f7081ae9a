"""Tries one piece of work in a forked child with limits, and says how it ended."""

import json
import os
import re
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from core.errors import TollhouseError
from engine.errors import EngineError

LOADED, REFUSED = "loaded", "refused"
_CPU_S, _WALL_S = 20, 120  # another process may have the processor
_MEMORY_BYTES = 1 << 30  # of address space beyond the parent's
_MOST_RESIDENT_MIB = 600
_MOST_MESSAGE = 4_000  # characters
_PYTHON = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Interrupt|Panic)\(")
_ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str  # LOADED, REFUSED, or how it failed
    message: str
    seconds: float
    mib: int  # resident, beyond the parent's


def tried(work: Callable[[], str], named: Callable[[str], bool], cpu_s: int = _CPU_S) -> Outcome:
    """How `work` ends. It may return a text, or refuse by an error of the project's own, in one line,
    that `named` accepts."""
    read, write = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if not child:
        os.close(read)
        _run(work, write, cpu_s)
    os.close(write)
    raw, late = _told(read, began + _WALL_S)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    seconds = round(time.monotonic() - began, 2)
    if not raw:
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        hung = late or ended == signal.SIGXCPU
        return Outcome("hang" if hung else "crash", f"signal {ended}, status {status}", seconds, 0)
    told = json.loads(raw)
    kind, message, mib = told["kind"], told["message"], told["mib"]
    if kind == REFUSED:
        kind = _judged(message, named)
    if kind in (LOADED, REFUSED) and mib > _MOST_RESIDENT_MIB:
        kind = "memory"
    return Outcome(kind, message, seconds, mib)


def _judged(message: str, named: Callable[[str], bool]) -> str:
    unclear = "\n" in message or len(message) > _MOST_MESSAGE or _PYTHON.search(message)
    return "unclear" if unclear or not named(message) else REFUSED


def _told(read: int, end: float) -> tuple[bytes, bool]:
    """What the child wrote, and whether it was still running at the end."""
    found = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([pipe], [], [], left)
            if not ready:
                break
            part = pipe.read(1 << 16)
            if not part:
                return found, False
            found += part
    return found, True


def _run(work: Callable[[], str], write: int, cpu_s: int) -> None:
    """In the child; does not return."""
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY_BYTES,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        before = _resident()
        kind, message = _end_of(work)
        told = {"kind": kind, "message": message[:20_000], "mib": max(0, _resident() - before)}
        content = json.dumps(told).encode()
        while content:
            content = content[os.write(write, content) :]
    finally:
        os._exit(0)


def _end_of(work: Callable[[], str]) -> tuple[str, str]:
    try:
        return LOADED, work()
    except (EngineError, TollhouseError) as error:
        return REFUSED, error.message
    except BaseException as error:  # a panic of a library is one
        return "traceback", f"{type(error).__name__}: {str(error)[:300]} at {_place(error)}"


def _place(error: BaseException) -> str:
    """The last line of the project that it passed."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_ROOT) and ".venv" not in path.parts:
            return f"{path.relative_to(_ROOT)}:{frame.lineno}"
    return "?"


def _resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
