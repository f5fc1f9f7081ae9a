"""The runner of a group of ranks: the first rank's own, and what it tells the others."""

import queue
import time
from collections.abc import Callable
from typing import Any

from engine.backends.compiled.group import Group
from engine.batch import AdapterHandle, Sampled, StepBatch
from engine.errors import AdapterError, RankError
from engine.parallel.follower import Answer
from engine.parallel.messages import (
    DROP,
    END,
    LOAD,
    REGISTER,
    UNLOAD,
    Message,
    StepWriter,
    as_fields,
    encode,
)
from engine.parallel.ring import RingWriter
from engine.protocol import AdapterState, Grammar
from engine.runners.cpu.runner import CpuRunner

_LOOK_S = 0.2  # how often one that waits for an answer looks whether the group is over
_READ_S = 300.0  # longest wait for a rank that reads an adapter


class ParallelRunner:
    """Implements `engine.batch.Runner`. The first rank samples, and answers for all.

    A failure of any rank raises RankError, which stops the engine: what the ranks have computed may no
    longer be the same.
    """

    windowed = None
    overlapped = False
    drafter = None

    def __init__(
        self,
        local: CpuRunner,
        group: Group,
        ring: RingWriter,
        answers: "list[queue.SimpleQueue[Answer]]",
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`answers`: of the ranks 1 and up. `close`: what ends the other ranks' processes."""
        self._local = local
        self._group = group
        self._ring = ring
        self._answers = answers
        self._close = close
        self._steps = StepWriter()
        self._calls = 0
        self._sizes: dict[str, tuple[int, int]] = {}  # by adapter: most blocks, bytes of all ranks
        self.info = local.info
        self.sight = local.sight
        self.scores_prompts = local.scores_prompts
        self.expert_rows = local.expert_rows
        self.block_bytes, self.bare_bytes = local.block_bytes, local.bare_bytes
        self.layout = f"{local.layout} tp {group.size}"
        self.work = local.work

    def launch(self, batch: StepBatch) -> list[Sampled]:
        batch = self._local.known(batch)
        self._tell(self._steps.step(batch))
        sampled: list[Sampled] = self._alike(lambda: self._local.launch(batch))
        return sampled

    def collect(self, ticket: list[Sampled]) -> list[Sampled]:
        return self._local.collect(ticket)

    def check(self) -> None:
        """Raises RankError if a rank has ended, also where no step runs."""
        if self._group.over:
            raise RankError(self._group.reason or "another rank ended the group")

    def close(self) -> None:
        """Ends the other ranks."""
        if not self._group.over:
            self._tell((END, None))
        self._close()

    def register_adapter(self, path: str) -> AdapterState:
        self._calls += 1
        call = self._calls
        self._tell((REGISTER, (call, path)))
        state, refused = None, None
        try:
            state = self._local.register_adapter(path)
        except AdapterError as error:
            refused = error
        found = [self._answer(rank, call) for rank in range(1, self._group.size)]
        for rank, (_, digest, _, _, code, message) in enumerate(found, 1):
            if code:
                refused = refused or AdapterError(code, message)
            elif state is not None and digest != state.digest:
                message = f"{path} changed while rank {rank} read it: load it again"
                refused = refused or AdapterError("invalid_adapter", message)
        if refused is not None or state is None:
            for digest in {each[1] for each in found if each[1]}:
                self._tell((DROP, digest))
            if state is not None:
                self._local.drop_adapter(state.digest)
            assert refused is not None
            raise refused
        blocks, bytes_ = zip(*(each[2:4] for each in found), strict=True)
        digest = state.digest
        self._sizes[digest] = (
            max(self._local.adapter_blocks(digest), *blocks),
            self._local.adapter_host_bytes(digest) + sum(bytes_),
        )
        return state

    def drop_adapter(self, digest: str) -> None:
        self._tell((DROP, digest))
        self._sizes.pop(digest, None)
        self._local.drop_adapter(digest)

    def adapter_blocks(self, digest: str) -> int:
        found = self._sizes.get(digest)
        return self._local.adapter_blocks(digest) if found is None else found[0]

    def adapter_host_bytes(self, digest: str) -> int:
        found = self._sizes.get(digest)
        return self._local.adapter_host_bytes(digest) if found is None else found[1]

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None:
        self._tell((LOAD, (as_fields(handle), blocks)))
        self._alike(lambda: self._local.load_adapter(handle, blocks))

    def unload_adapter(self, handle: AdapterHandle) -> None:
        self._tell((UNLOAD, as_fields(handle)))
        self._alike(lambda: self._local.unload_adapter(handle))

    def grammar_ready(self, grammar: Grammar) -> bool:
        return self._local.grammar_ready(grammar)

    def prepare_grammar(self, grammar: Grammar) -> object:
        return self._local.prepare_grammar(grammar)

    def forced(self, seq: int) -> list[int]:
        return self._local.forced(seq)

    def read_blocks(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        """Refused: copies outside the pool are of one rank's part (`engine.parallel.limits`)."""
        raise NotImplementedError("a group of ranks has no copies outside the pool")

    def write_blocks(self, blocks: list[int], data: list[bytes]) -> None:
        """Refused, as `read_blocks`."""
        raise NotImplementedError("a group of ranks has no copies outside the pool")

    def forget(self, seq: int) -> None:
        self._steps.forget(seq)
        self._local.forget(seq)

    def _tell(self, message: Message) -> None:
        self.check()
        self._ring.write(encode(message))

    def _alike(self, do: Callable[[], Any]) -> Any:
        """What the other ranks do too: it fails on all, or the group ends."""
        try:
            return do()
        except RankError:
            raise
        except Exception as error:
            why = f"rank 0: {type(error).__name__}: {error}"
            self._group.end(why)
            raise RankError(why) from error

    def _answer(self, rank: int, call: int) -> Answer:
        until = time.monotonic() + _READ_S
        while time.monotonic() < until:
            self.check()
            try:
                found = self._answers[rank - 1].get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if found[0] == call:
                return found
        why = f"rank {rank} has not read an adapter within {_READ_S:g} s"
        self._group.end(why)
        raise RankError(why)
