"""Tries untrusted grammars in a process of their own, whose time and memory are bounded.

llguidance bounds the work of a step, but some schemas (an intersection of patterns, `multipleOf` a
large number) make it build automata for minutes, which a thread cannot stop.
"""

import json
import os
import resource
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

import numpy as np

from engine.decoding.grammar.compiler import GrammarCompiler, refused
from engine.errors import RequestError
from engine.protocol import Grammar

DEADLINE_S = 2.0  # to compile and to try a grammar
_START_S = 60.0  # for the process to import and to read the tokenizer
_MEMORY = 1 << 30  # bytes that one may add
_STEPS = 64  # of a trial answer
_SLOW_S = 0.1  # most time of one mask in it


class GrammarChecker:
    """The engine's end. Safe in threads: one grammar at a time, others wait."""

    def __init__(self, tokenizer: Callable[[], str], vocab: int, eos: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._eos = eos
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def check(self, grammar: Grammar) -> None:
        """Raises RequestError naming what cannot be served."""
        with self._lock:
            process = self._process or self._start()
            _send(process, [grammar.kind, grammar.text])
            reply = _receive(process, DEADLINE_S)
            if reply is None:
                self._stop()
                raise refused(
                    grammar.kind,
                    f"it takes more than {DEADLINE_S:g} s or {_MEMORY >> 20} MiB: simplify it",
                )
        if reply:
            raise RequestError("invalid_grammar", reply)

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


def _receive(process: "subprocess.Popen[bytes]", timeout_s: float) -> str | None:
    """The reply; None if none comes in time."""
    assert process.stdout is not None
    until, line = time.monotonic() + timeout_s, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
        part = os.read(process.stdout.fileno(), 65_536) if ready else b""
        if not part:
            return None
        line += part
    return str(json.loads(line))


def try_grammar(compiler: GrammarCompiler, grammar: Grammar) -> str:
    """Why the grammar is refused, or nothing. Compiles it and follows a random answer."""
    try:
        matcher = compiler.matcher(grammar)
    except RequestError as error:
        return error.message
    random = np.random.default_rng(0)
    for _ in range(_STEPS):
        started = time.perf_counter()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if time.perf_counter() - started > _SLOW_S:
            return refused(grammar.kind, "a step of it takes too long: simplify it").message
        if matcher.is_error():
            return refused(grammar.kind, matcher.get_error()).message
        allowed = np.nonzero(np.unpackbits(mask, bitorder="little"))[0]
        if matcher.is_stopped() or not len(allowed):
            return ""
        matcher.consume_token(int(random.choice(allowed)))
    return ""


def main() -> None:
    """Replies to each grammar on the standard input with one line."""
    os.nice(5)
    model = json.loads(sys.stdin.buffer.readline())
    compiler = GrammarCompiler(lambda: str(model["tokenizer"]), model["vocab"], tuple(model["eos"]))
    pages = int(open("/proc/self/statm", encoding="ascii").read().split()[0])  # noqa: SIM115
    most = pages * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _reply("ready")
    for line in sys.stdin.buffer:
        _reply(try_grammar(compiler, Grammar(*json.loads(line))))


def _reply(text: str) -> None:
    sys.stdout.write(json.dumps(text) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
