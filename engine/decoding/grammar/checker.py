"""Tries untrusted grammars in a process of their own, whose time and memory are bounded.

llguidance bounds the work of a step, but some schemas (an intersection of patterns, `multipleOf` a
large number) make it build automata for minutes, which a thread cannot stop.
"""

import json
import math
import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.decoding.grammar.compiler import GrammarCompiler, refused, source_of
from engine.errors import RequestError
from engine.protocol import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

DEADLINE_S = 2.0  # of processor time, to compile and to try a grammar
_WAIT_S = 30.0  # for the same by the clock: a busy machine lets the process wait
_LOOK_S = 0.05
_START_S = 60.0  # for the process to import and to read the tokenizer
_MEMORY = 1 << 30  # bytes that one may add
_STEPS = 64  # of a trial answer
_SLOW_S = 0.1  # most processor time of one mask in it


class GrammarChecker:
    """The engine's end. Safe in threads: one grammar at a time, others wait."""

    def __init__(self, tokenizer: Callable[[], str], vocab: int, eos: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos = eos
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def check(self, grammar: Grammar) -> str:
        """Its `source_of`, which takes the interpreter's lock, and that not in the engine's process.
        Raises RequestError naming what cannot be served."""
        with self._lock:
            process = self._process or self._start()
            _send(process, [grammar.kind, grammar.text])
            reply = _receive(process, _WAIT_S, DEADLINE_S)
            if reply is None:
                self._stop()
                raise refused(
                    grammar.kind,
                    f"it takes more than {DEADLINE_S:g} s or {_MEMORY >> 20} MiB: simplify it",
                )
        refusal, source = reply
        if refusal:
            raise RequestError("invalid_grammar", refusal)
        return str(source)

    def _stop(self) -> None:
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _start(self) -> "subprocess.Popen[bytes]":
        model = {"tokenizer": self._tokenizer(), "vocab": self._vocab, "eos": self._eos}
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.decoding.grammar.checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _send(process, model)
        if _receive(process, _START_S) is None:
            _end(process)
            raise RequestError("internal", "the process that checks grammars did not start")
        weakref.finalize(self, _end, process)
        self._process = process
        return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(ValueError, BrokenPipeError):  # its pipes are closed
        process.communicate()


def _send(process: "subprocess.Popen[bytes]", message: Any) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return  # it has died: no reply will come


def _receive(
    process: "subprocess.Popen[bytes]", wait_s: float, processor_s: float = math.inf
) -> Any:
    """The reply; None if none comes in time, by the clock or by what the process has worked."""
    assert process.stdout is not None
    until, most, line = time.monotonic() + wait_s, _worked_s(process) + processor_s, b""
    while not line.endswith(b"\n"):
        if not select.select([process.stdout], [], [], _LOOK_S)[0]:
            if time.monotonic() > until or _worked_s(process) > most:
                return None
            continue
        part = os.read(process.stdout.fileno(), 65_536)
        if not part:
            return None
        line += part
    return json.loads(line)


def _worked_s(process: "subprocess.Popen[bytes]") -> float:
    """The processor time that it has used."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0  # it has died
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def try_grammar(compiler: GrammarCompiler, grammar: Grammar) -> tuple[str, str]:
    """Why the grammar is refused, or nothing and its `source_of`."""
    try:
        source = source_of(grammar)
        return _followed(compiler.compile(grammar, source).matcher(), grammar.kind), source
    except RequestError as error:
        return error.message, ""


def _followed(matcher: "LLMatcher", kind: str) -> str:
    """Why a random answer cannot be followed to its end, or nothing."""
    random = np.random.default_rng(0)
    for _ in range(_STEPS):
        started = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if time.thread_time() - started > _SLOW_S:
            return refused(kind, "a step of it takes too long: simplify it").message
        if matcher.is_error():
            return refused(kind, matcher.get_error()).message
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0]
        if matcher.is_stopped() or not len(allowed):
            return ""
        matcher.consume_token(int(random.choice(allowed)))
    return ""


def main() -> None:
    """Replies to each grammar on the standard input with one line."""
    os.nice(5)
    import_module("llguidance")  # before the first grammar's time begins
    model = json.loads(sys.stdin.buffer.readline())
    eos = tuple(model["eos"])
    compiler = GrammarCompiler(lambda: str(model["tokenizer"]), model["vocab"], eos, kept=0)
    pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])  # noqa: SIM115
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _reply("ready")
    for line in sys.stdin.buffer:
        _reply(try_grammar(compiler, Grammar(*json.loads(line))))


def _reply(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
