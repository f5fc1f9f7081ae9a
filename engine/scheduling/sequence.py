"""A request inside the engine, and the sequences of its choices."""

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.batch import AdapterHandle
from engine.protocol import (
    WHOLE,
    FinishReason,
    GenerateRequest,
    PromptLogprob,
    Receipt,
    SamplingParams,
    TokenChunk,
)


class SequenceStatus(Enum):
    WAITING = auto()  # in the queue: new, or preempted
    RUNNING = auto()  # holds blocks
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """One choice of a request."""

    number: int
    request: "Request"
    choice: int
    history: list[int]  # prompt and accepted output
    prompt_len: int
    status: SequenceStatus = SequenceStatus.WAITING
    computed: int = 0  # positions whose KV is present, or will be after the steps in flight
    counted_until: int = 0  # positions already counted once; computing below it is recomputing
    blocks: list[int] = field(default_factory=list)
    # Of `blocks`, which no layer sees any more, and which were released, but for the heavy ones.
    unheld: range = range(0)
    parts: range = range(0)  # of `blocks`, whose parts for layers with a window it holds too
    table_version: int = 0  # of `blocks`; see `Row.table_version`
    keys: list[bytes] = field(default_factory=list)  # of the full blocks of history
    handle: AdapterHandle | None = None
    in_flight: int = 0  # steps launched and not collected
    pending: int = 0  # tokens sampled by steps in flight, which the host does not know yet
    overtaken: int = 0  # later requests of the tenant that went first because of their prefix
    bypassed: int = 0  # admissions that bypassed it while it lacked blocks
    last_token_at: float = 0.0

    @property
    def held_blocks(self) -> list[int]:
        heavy = [n for n in self.request.heavy or () if n in self.unheld]
        return [
            *self.blocks[: self.unheld.start],
            *(self.blocks[number] for number in heavy),
            *self.blocks[self.unheld.stop :],
        ]

    @property
    def held_parts(self) -> list[int]:
        """The blocks whose parts for layers with a window it holds (`engine.cache.windowed`)."""
        return self.blocks[self.parts.start : self.parts.stop]

    def let_go(self, unread: range) -> list[int]:
        """Leaves out the blocks of these numbers, from now on; those that were still held."""
        end = min(unread.stop, len(self.blocks))
        begin = max(unread.start, self.unheld.stop)
        if end <= begin:
            return []
        self.unheld = range(unread.start, end)
        heavy = self.request.heavy or ()
        return [self.blocks[number] for number in range(begin, end) if number not in heavy]

    @property
    def read_until(self) -> int:
        """The positions that its last delivered token could have been chosen by."""
        return min(self.counted_until, max(self.prompt_len, len(self.history) - 1))

    @property
    def choices(self) -> int:
        """The choices that it stands for: all of its request until that forks."""
        return 1 if self.request.forked else self.request.inputs.sampling.n

    @property
    def output_len(self) -> int:
        return len(self.history) - self.prompt_len

    @property
    def remaining(self) -> int:
        return len(self.history) + self.pending - self.computed

    @property
    def decoding(self) -> bool:
        return self.remaining == 1 and self.computed >= self.prompt_len


@dataclass(eq=False, slots=True)
class Request:
    """A request, and the counters that become its receipt."""

    inputs: GenerateRequest
    origin: str  # id of the gateway that sent it
    arrived: float
    limit: int  # most positions of a choice, prompt included
    public_blocks: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    forked: bool = False
    settled: bool = False
    voided: bool = False  # ended by a fault of its computation: its prompt is not charged
    cached: int | None = None  # frozen at first admission
    reached: int = 0  # prompt positions whose KV was present at some time, without a gap
    computed: int = 0
    recomputed: int = 0
    generated: int = 0
    delivered: int = 0
    discarded: int = 0
    rejected: int = 0
    accepted: int = 0  # guesses that proved right
    busy_s: float = 0.0  # its share of the steps' time
    scores: list[PromptLogprob] = field(default_factory=list)  # until choice 0's first chunk
    scored: int = 0  # prompt tokens that have their score
    admitted_at: float | None = None
    first_token_at: float | None = None
    finish_reason: FinishReason | None = None
    message: str = ""
    asked: SamplingParams | None = None  # where more choices are sampled than are delivered
    held: list[TokenChunk] = field(default_factory=list)  # of all choices, until the request ends
    withheld: int = 0  # tokens of choices that are not delivered
    kept: int = 0  # most positions that a token sees by the operator's `kv_window`; 0: all
    heavy: tuple[int, ...] | None = (
        None  # numbers of the blocks that answers see besides (`Eviction`)
    )
    block_size: int = 0  # of these; 0: answers have no such blocks
    grammar: object = None  # held here, so that it stays compiled

    def __post_init__(self) -> None:
        if self.inputs.sampling.prompt_logprobs is not None:
            self.scores, self.scored = [PromptLogprob(self.inputs.prompt[0])], 1

    @property
    def deadline(self) -> float | None:
        return None if self.inputs.deadline_s is None else self.arrived + self.inputs.deadline_s

    @property
    def open(self) -> bool:
        return any(s.status is not SequenceStatus.FINISHED for s in self.sequences)

    @property
    def in_flight(self) -> bool:
        return any(s.in_flight for s in self.sequences)

    @property
    def unscored(self) -> bool:
        """Whether prompt tokens still lack their log-probability, which the request asks for. Until
        then every position is computed, also those whose keys and values are cached."""
        wanted = self.inputs.sampling.prompt_logprobs is not None
        return wanted and self.scored < len(self.inputs.prompt)

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether cached keys and values of the prompt are of no use."""
        return self.unscored or self.inputs.sampling.pooling in ("mean", "cls")

    def add_scores(self, position: int, scores: list[PromptLogprob]) -> None:
        """The scores of the prompt from `position` on, some of them perhaps known: after a
        preemption they are computed again."""
        fresh = scores[max(0, self.scored - position) :]
        self.scores += fresh
        self.scored += len(fresh)

    def take_scores(self) -> list[PromptLogprob] | None:
        """All of the prompt's, once."""
        if self.unscored or not self.scores:
            return None
        scores, self.scores = self.scores, []
        return scores

    def reach(self, start: int, end: int) -> None:
        """The positions from `start` to `end` were computed. Kept apart from the counts that are
        charged, so that one can be compared with the other."""
        if start <= self.reached:
            self.reached = max(self.reached, min(end, len(self.inputs.prompt)))

    def wrong_counts(self) -> dict[str, int]:
        """By how much each count exceeds the positions or tokens that it counts; empty if none."""
        found = {
            "cached + computed": (self.cached or 0) + self.computed - self.reached,
            "generated": self.generated - sum(s.output_len for s in self.sequences),
            "delivered": self.delivered + self.withheld - self.generated,
        }
        if self.finish_reason in WHOLE:
            found["unprocessed"] = len(self.inputs.prompt) - self.reached
        return {name: excess for name, excess in found.items() if excess}

    @property
    def dropped(self) -> int:
        """Positions of the longest choice that its last tokens did not see, by `kv_window`."""
        if not self.kept or self.voided:
            return 0
        read = max(seq.read_until for seq in self.sequences)
        if not self.block_size:
            return max(0, read - self.kept)
        if read <= len(self.inputs.prompt):
            return 0  # the prompt's queries see all
        return max(0, read - self.kept - len(self.heavy or ()) * self.block_size)

    def receipt(self, now: float) -> Receipt:
        cached, computed = (0, 0) if self.voided else (self.cached or 0, self.computed)
        started = self.admitted_at if self.admitted_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        processed = 0 if self.voided else self.reached
        return Receipt(
            request_id=self.inputs.request_id,
            namespace=self.inputs.namespace,
            adapter=self.inputs.adapter,
            prompt=processed,
            cached=cached,
            computed=computed,
            unprocessed=len(self.inputs.prompt) - processed,
            generated=self.generated,
            delivered=self.delivered,
            recomputed=self.recomputed,
            discarded=self.discarded,
            rejected=self.rejected,
            accepted=self.accepted,
            finish_reason=self.finish_reason or FinishReason.ERROR,
            queue_s=started - self.arrived,
            prefill_s=first - started,
            decode_s=now - first,
            message=self.message,
            note=self.inputs.note,
            busy_us=round(self.busy_s * 1e6),
            dropped=self.dropped,
        )
