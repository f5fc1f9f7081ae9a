"""What the scheduler asks of the runner for one step, and what comes back. No torch here."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.protocol import AdapterState, EngineInfo, SamplingParams

# In `Row.tokens`: the id that the previous step sampled for this sequence and that still lies on
# the device (overlapped stepping); the runner knows it, the scheduler does not yet.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True)
class AdapterHandle:
    """The one name of a loaded adapter. A step that meets another generation in the slot is a bug
    and must stop, not serve someone else's weights."""

    digest: str
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's share of a step."""

    seq: int  # the engine's own number of the sequence, stable over its life
    tokens: list[int]  # ids to compute now: one when decoding, a chunk when prefilling
    start: int  # position of tokens[0]; KV below it is present
    blocks: list[int]  # the block table, covering start + len(tokens) positions
    adapter: AdapterHandle | None
    sample: bool  # whether the last token's logits give the next token
    sampling: SamplingParams
    choice: int
    history: list[int]  # prompt and output ids so far, by reference: read only
    prompt_len: int  # history[prompt_len:] is output


@dataclass(frozen=True, slots=True)
class StepBatch:
    rows: list[Row]  # decode rows first, then prompt chunks
    # Blocks (from, to), before the step.
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

    Adapter memory comes out of the KV budget in whole blocks: `adapter_blocks` says how many an
    adapter of that file needs, the scheduler's side takes them from the block pool, and
    `load_adapter` is told which.
    """

    info: EngineInfo
    overlapped: bool  # whether `launch` returns early: the next step is worth preparing meanwhile

    def register_adapter(self, path: str) -> AdapterState:
        """Read and check a PEFT directory into host memory; its digest is `adapter_digest`.
        Called from a loader thread. Raises AdapterError."""

    def drop_adapter(self, digest: str) -> None:
        """Forget the host copy; never called while the adapter has a slot."""

    def launch(self, batch: StepBatch) -> Any:
        """A ticket for the step, which is now under way on the device."""

    def collect(self, ticket: Any) -> list[Sampled]:
        """`ticket` is what this runner's own `launch` gave."""

    def adapter_blocks(self, digest: str) -> int: ...

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None: ...

    def unload_adapter(self, handle: AdapterHandle) -> None: ...

    def forget(self, seq: int) -> None:
        """The sequence is over: drop what is kept for it (seeded generator, last token)."""
