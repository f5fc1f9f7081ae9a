"""The interface between scheduler and runner: the batch of a step and its results. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from engine.model_spec import ModelSpec, Sight
from engine.protocol import (
    AdapterState,
    EngineInfo,
    Grammar,
    PromptLogprob,
    SamplingParams,
    TokenLogprob,
)

if TYPE_CHECKING:
    from engine.cache.parts import Windowed


# Between those of a CPU core (about 10) and of a data centre's GPU (about 300 in 16 bits).
FLOPS_PER_BYTE = 100


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model's step reads and computes. Sizes in bytes, operations in floating-point operations."""

    weight_bytes: float  # read once a step
    token_flops: float  # of a token, without attention
    position_bytes: float  # of the keys and values of a position
    position_flops: float  # of the attention of a token to one position
    window: int = 0  # positions that the layers with a sliding window see; 0: there are none
    full_share: float = 1.0  # of the layers that see all positions

    def visible(self, length: float) -> float:
        """Positions that a token after `length` positions sees, as an average over the layers."""
        if not self.window:
            return length
        return self.full_share * length + (1 - self.full_share) * min(length, self.window)

    def of_row(self, row: "Row", step_tokens: int) -> float:
        """The work of a row in a step of so many tokens."""
        count = len(row.tokens)
        flops = self.token_flops + self.position_flops * self.visible(row.start + (count + 1) / 2)
        read = self.position_bytes * self.visible(row.start + count)
        return count * (flops / FLOPS_PER_BYTE + self.weight_bytes / step_tokens) + read


def model_work(spec: ModelSpec, weight_bytes: int, position_bytes: float) -> ModelWork:
    attention = spec.hidden * (2 * spec.q_width + 2 * spec.kv_width)
    mlps = 0
    for layer in range(spec.layers):
        experts = spec.experts_of(layer)
        inner = (
            spec.intermediate
            if experts is None
            else experts.active * experts.intermediate + experts.shared
        )
        mlps += 3 * spec.hidden * inner
    seen = [spec.attention(layer).sight.most for layer in range(spec.layers)]
    windows = [most for most in seen if most]
    return ModelWork(
        weight_bytes=weight_bytes,
        token_flops=2 * (spec.layers * attention + mlps),
        position_bytes=position_bytes,
        position_flops=4 * spec.layers * spec.q_width,
        window=max(windows, default=0),
        full_share=1 - len(windows) / spec.layers,
    )


# In `Row.tokens`: the id that the previous step sampled for this sequence, still on the device
# (overlapped stepping). The runner knows it, the scheduler does not yet.
LAST_SAMPLED = -1


@dataclass(frozen=True, slots=True)
class AdapterHandle:
    """Identifies a loaded adapter. A step that finds another generation in the slot must stop, or
    it would compute with another adapter's weights."""

    digest: str
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class AnswerSight:
    """What the positions from `start` on see: the last and first ones of `sight`, and `blocks`, which
    are numbers of the sequence's blocks in order."""

    start: int
    sight: Sight
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The part of a step that belongs to one sequence."""

    seq: int  # the engine's number of the sequence, stable while it lives
    tokens: list[int]  # ids to compute now: one when decoding, a chunk when prefilling
    start: int  # position of tokens[0]; the KV of earlier positions is present
    blocks: list[int]  # the block table by reference; it covers at least this row's positions
    adapter: AdapterHandle | None
    sample: bool  # whether the last token's logits give the next token
    sampling: SamplingParams
    choice: int
    history: list[int]  # prompt and output ids so far, by reference: read-only
    prompt_len: int  # history[prompt_len:] is output
    drafts: int = 0  # how many of the last `tokens` are guesses, to be verified by this step
    table_version: int = 0  # rises when blocks that were there before change; growth keeps it
    answer: AnswerSight | None = None  # of positions that do not see all
    # From which position on the prompt's queries count what attention they give to each block.
    observed: int | None = None
    scored: int = 0  # after how many of the first `tokens` the prompt's next token is scored

    @property
    def sampled_tokens(self) -> int:
        """How many of the last `tokens` give logits."""
        return 1 + self.drafts if self.sample and not self.sampling.pooling else 0

    @property
    def logit_tokens(self) -> list[int]:
        """Which of `tokens` give logits: first those that score the prompt."""
        count = len(self.tokens)
        return [*range(self.scored), *range(count - self.sampled_tokens, count)]

    @property
    def pooled_tokens(self) -> range:
        """Which of `tokens` give states for the request's embedding."""
        count = len(self.tokens)
        match self.sampling.pooling:
            case "mean":
                return range(count)
            case "cls":
                return range(0 if self.start else 1)
            case "last":
                return range(count - self.sample, count)
        return range(0)

    @property
    def position(self) -> int:
        """Of the token that follows: the one about to be sampled."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class StepBatch:
    rows: list[Row]  # decode rows first, then prompt chunks
    # Blocks (from, to) to copy before the step.
    copies: list[tuple[int, int]] = field(default_factory=list)
    part_copies: list[tuple[int, int]] = field(default_factory=list)  # of slots or pages, likewise


@dataclass(frozen=True, slots=True)
class Sampled:
    """The next tokens of one sequence: the guesses that proved right, and one more.

    No tokens: the row's last position must be computed again, or `error` says why there are none.
    """

    seq: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None  # of each token, if the request asks for them
    ended: bool = False  # the request's grammar allows nothing more
    error: str = ""
    scores: list[PromptLogprob] | None = None  # of a row that scores its prompt
    embedding: bytes | None = None  # of a request with `pooling`, in place of tokens
    # Of each block: the attention from the queries that `Row.observed` names, over all heads and layers
    # but the last.
    attention: list[float] | None = None


class Drafter(Protocol):
    """A draft model."""

    step_s: float  # seconds of a guess for each sequence, on average; 0: not measured yet

    def guesses(self, histories: dict[int, list[int]], count: int) -> dict[int, list[int]]:
        """`count` guesses after each history, by the sequence's number; none for some."""

    def forget(self, number: int) -> None:
        """The sequence has ended."""


class Runner(Protocol):
    """The device side. `launch` may return before the device is done; `collect` waits for it.

    Adapter memory comes out of the KV budget in whole blocks: `adapter_blocks` returns how many
    an adapter needs, the scheduler allocates them from the block pool, and `load_adapter` gets
    their numbers.
    """

    info: EngineInfo
    sight: Sight  # the positions that any layer sees
    # How blocks divide into parts for layers with a window and the rest; None: they do not.
    windowed: "Windowed | None"
    overlapped: bool  # `launch` returns early, so the next step can be prepared meanwhile
    scores_prompts: bool  # whether it follows `Row.scored`
    drafter: Drafter | None
    expert_rows: Mapping[int, Sequence[int]]  # that each expert has computed, by layer
    block_bytes: int  # of a block of keys and values
    bare_bytes: int  # of a block without its part
    layout: str  # of the bytes of a block, and the kind of device that computes them
    work: "ModelWork"  # what its rows read and compute

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

    def adapter_host_bytes(self, digest: str) -> int:
        """Host memory of a registered adapter's copy."""

    def load_adapter(self, handle: AdapterHandle, blocks: list[int]) -> None: ...

    def unload_adapter(self, handle: AdapterHandle) -> None: ...

    def grammar_ready(self, grammar: Grammar) -> bool:
        """Whether `prepare_grammar` returns or refuses at once."""

    def prepare_grammar(self, grammar: Grammar) -> object:
        """Check and compile a grammar, in any thread. It stays compiled for as long as the result is
        held. Raises RequestError."""

    def forced(self, seq: int) -> list[int]:
        """The only ids that the sequence's grammar allows next, after what was collected."""

    def read_blocks(self, blocks: list[int]) -> Callable[[], list[bytes]]:
        """Copy blocks as the steps so far leave them; the function, for any thread, waits for it."""

    def write_blocks(self, blocks: list[int], data: list[bytes]) -> None:
        """Fill blocks that no step in flight uses with what `read_blocks` gave."""

    def forget(self, seq: int) -> None:
        """The sequence has ended: drop its state (seeded generator, last token)."""
