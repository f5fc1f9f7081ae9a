"""A rank other than the first: does what the first says, in its order."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.backends.compiled.group import Group
from engine.errors import AdapterError, RankError
from engine.parallel.messages import (
    DROP,
    END,
    LOAD,
    REGISTER,
    STEP,
    UNLOAD,
    StepReader,
    as_handle,
    decode,
)
from engine.parallel.ring import RingReader
from engine.runners.cpu.runner import CpuRunner

# (number of the call, digest, blocks, bytes in host memory, code and message of an error)
Answer = tuple[int, str, int, int, str, str]


class Follower:
    """`answer` takes the results of reading adapters; another thread may call it."""

    def __init__(
        self, runner: CpuRunner, group: Group, ring: RingReader, answer: Callable[[Answer], None]
    ) -> None:
        self._runner = runner
        self._group = group
        self._ring = ring
        self._answer = answer
        self._steps = StepReader()

    def run(self) -> None:
        """Until the first rank ends, or the group does. Raises RankError for what this rank cannot do."""
        with ThreadPoolExecutor(1, thread_name_prefix="adapter-loader") as reading:
            while (data := self._ring.read()) is not None:
                kind, carried = decode(data)
                if kind == END:
                    return
                try:
                    if kind == REGISTER:
                        reading.submit(self._register, *carried)
                    else:
                        self._do(kind, carried)
                except RankError:
                    raise
                except Exception as error:
                    why = f"rank {self._group.rank}: {type(error).__name__}: {error}"
                    self._group.end(why)
                    raise RankError(why) from error

    def _do(self, kind: int, carried: Any) -> None:
        if kind == STEP:
            self._runner.compute(self._steps.batch(carried))
        elif kind == LOAD:
            self._runner.load_adapter(as_handle(carried[0]), carried[1])
        elif kind == UNLOAD:
            self._runner.unload_adapter(as_handle(carried))
        elif kind == DROP:
            self._runner.drop_adapter(carried)

    def _register(self, call: int, path: str) -> None:
        try:
            digest = self._runner.register_adapter(path).digest
            sizes = self._runner.adapter_blocks(digest), self._runner.adapter_host_bytes(digest)
            self._answer((call, digest, *sizes, "", ""))
        except AdapterError as error:
            self._answer((call, "", 0, 0, error.code, error.message))
        except Exception as error:
            self._answer((call, "", 0, 0, "adapter_unreadable", f"{path}: {error}"))
