"""The interface between scheduler and runner: the batch of a step and its results. No torch."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import AdapterState, EngineInfo, SamplingParams

# In `Row.tokens`: the id that the previous step sampled for this sequence, still on the device
# (overlapped stepping). The runner knows it, the scheduler does not yet.
LAST_SAMPLED = -1

# In `Sampled.token`: the row's logits were not finite, so no token was chosen.
NOT_FINITE = -1


@dataclass(frozen=True, slots=True)
class AdapterHandle:
    """Identifies a loaded adapter. A step that finds another generation in the slot must stop, or
    it would compute with another adapter's weights."""

    digest: str
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Row:
    """The part of a step that belongs to one sequence."""

    seq: int  # the engine's number of the sequence, stable while it lives
    tokens: list[int]  # ids to compute now: one when decoding, a chunk when prefilling
    start: int  # position of tokens[0]; the KV of earlier positions is present
    blocks: list[int]  # the block table, covering start + len(tokens) positions
    adapter: AdapterHandle | None
    sample: bool  # whether the last token's logits give the next token
    sampling: SamplingParams
    choice: int
    history: list[int]  # prompt and output ids so far, by reference: read-only
    prompt_len: int  # history[prompt_len:] is output


@dataclass(frozen=True, slots=True)
class StepBatch:
    rows: list[Row]  # decode rows first, then prompt chunks
    # Blocks (from, to) to copy before the step.
    copies: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next token of one sequence."""

    seq: int
    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Runner(Protocol):
    """The device side. `launch` may return before the device is done; `collect` waits for it.

    Adapter memory comes out of the KV budget in whole blocks: `adapter_blocks` returns how many
    an adapter needs, the scheduler allocates them from the block pool, and `load_adapter` gets
    their numbers.
    """

    info: EngineInfo
    overlapped: bool  # `launch` returns early, so the next step can be prepared meanwhile

    def register_adapter(self, path: str) -> AdapterState:
        """Read and check a PEFT directory into host memory; its digest is `adapter_digest`.
        Called from a loader thread. Raises AdapterError."""

    def drop_adapter(self, digest: str) -> None:
        """Forget the host copy; never called while the adapter has a slot."""

    def launch(self, batch: StepBatch) -> Any:
        """Start the step on the device. Returns a ticket for `collect`."""

    def collect(self, ticket: Any) -> list[Sampled]:
        """The results of the step; `ticket` is the value that `launch` returned."""

    def adapter_blocks(self, digest: str) -> int: ...

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None: ...

    def unload_adapter(self, handle: AdapterHandle) -> None: ...

    def forget(self, seq: int) -> None:
        """The sequence has ended: drop its state (seeded generator, last token)."""
