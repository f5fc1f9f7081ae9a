"""Counts the work of requests in one process: `counting.py own|bare WORKS REQUESTS calls|instructions`,
in the root of a checkout. One JSON object a work on stdout.

Instructions are counted by valgrind, under which this file then runs: for each work it asks for a dump
of what was counted since the last one, by valgrind's client requests.
"""

import asyncio
import ctypes
import gc
import importlib
import itertools
import json
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

sys.path[0] = os.getcwd()  # the checkout's gateway, by this harness

from benchmarks.gateway_load.costs import _FORWARDED, works  # noqa: E402
from benchmarks.gateway_load.load import NEW, bodies  # noqa: E402
from benchmarks.gateway_load.own import MODEL  # noqa: E402

WARM_UP = 640  # requests: more than there are known prompts
_REQUEST = "53 4889f8 4889f2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 5b c3"
_TOOL = (ord("C") << 24) + (ord("T") << 16)  # callgrind's requests begin here
_DUMP, _ZERO, _START, _STOP = _TOOL, _TOOL + 1, _TOOL + 4, _TOOL + 5
_numbers = itertools.count(10**6)


class Valgrind:
    """Its client requests, from a function of machine code (valgrind.h, x86-64)."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._page.write(bytes.fromhex(_REQUEST.replace(" ", "")))
        at = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)(at)

    def __call__(self, request: int) -> None:
        arguments = (ctypes.c_uint64 * 6)(request)
        self._call(ctypes.addressof(arguments), 0)


def _taken(lines: list[str], count: int) -> Iterator[bytes]:
    """Made before they are sent, so that they are not counted."""
    made = [lines[at % len(lines)].replace(NEW, str(next(_numbers))) for at in range(count)]
    return iter([each.encode() for each in made])


async def _counted(
    run: Callable[[Iterator[bytes]], Any], made: Callable[[int], Iterator[bytes]], requests: int
) -> dict[str, float]:
    """Calls of Python and of C functions, then bytecodes: by a request."""
    calls: Counter[str] = Counter()
    codes: Counter[CodeType] = Counter()

    def _called(_frame: FrameType, event: str, _argument: Any) -> None:
        calls[event] += 1

    def _traced(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            codes[frame.f_code] += 1
        return _traced

    taken = made(requests), made(requests)
    sys.setprofile(_called)
    await run(taken[0])
    sys.setprofile(None)
    sys.settrace(_traced)
    await run(taken[1])
    sys.settrace(None)
    own = (
        Path(__file__).resolve().parent / "in_process.py"
    )  # the clients and the upstream are not counted
    codes_of_servers = [n for code, n in codes.items() if Path(code.co_filename).resolve() != own]
    return {
        "python_calls": calls["call"] / requests,
        "c_calls": calls["c_call"] / requests,
        "bytecodes": sum(codes_of_servers) / requests,
    }


async def _main(harness: Any, which: str, names: list[str], requests: int, kind: str) -> None:
    forwarded = "".join(f"{name}: {value}\r\n" for name, value in _FORWARDED.items()).encode()
    loads = {**works(MODEL), "stream": bodies(MODEL, stream=True)}
    valgrind = Valgrind() if kind == "instructions" else None
    with tempfile.TemporaryDirectory() as made:
        async with getattr(harness, which)(Path(made)) as (make, key):
            await asyncio.sleep(1)  # what a start leaves for later
            for name in names:
                lines = loads["new" if name == "proxied" else name]
                headers = forwarded if name == "proxied" else b""
                clients = [harness.Client(make, key, headers) for _ in range(harness.CONNECTIONS)]

                async def _run(taken: Iterator[bytes], clients: Any = clients) -> None:
                    await asyncio.gather(*[each.load(taken) for each in clients])

                requested = partial(_taken, lines)
                await _run(requested(WARM_UP))
                gc.collect()
                gc.freeze()
                found: dict[str, float] = {}
                if valgrind is None:
                    found = await _counted(_run, requested, requests)
                else:
                    taken = requested(harness.CONNECTIONS), requested(requests)
                    valgrind(_START)
                    await _run(taken[0])
                    valgrind(_ZERO)
                    await _run(taken[1])
                    valgrind(_DUMP)
                    valgrind(_STOP)
                print(json.dumps({"work": name, **found}), flush=True)
    os._exit(0)  # nothing of it is kept


if __name__ == "__main__":
    which, names, requests, kind = sys.argv[1:]
    sys.path.append(str(Path(__file__).parent))
    harness: Any = importlib.import_module("in_process")
    with asyncio.Runner(loop_factory=harness.Loop) as runner:
        runner.run(_main(harness, which, names.split(","), int(requests), kind))
