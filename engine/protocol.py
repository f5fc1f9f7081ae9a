"""Plain records between the gateway and the engine: what is asked, what comes back, what is billed.

Everything here is data. The wire form (msgpack over ZeroMQ) lives in `engine/wire.py`, so that the
engine's core needs neither library.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop id was sampled
    LENGTH = "length"  # max_tokens or the context's end
    ABORT = "abort"  # the gateway asked
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the engine failed; see the receipt's message


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Applied in the order: penalties, temperature, truncation, softmax, sample."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0 is off; arXiv 2411.07641
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # how many top alternatives beside the chosen id; None is off
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request as the authenticated gateway puts it; no field is a client's word unchecked."""

    request_id: str
    namespace: str  # the tenant: root of the prefix cache and key of fairness
    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None = None  # SHA-256 of the adapter's weights, lower-case hex
    weight: float = 1.0  # the tenant's share against other tenants
    priority: int = 0  # higher goes first
    deadline_s: float | None = None  # seconds from arrival at the engine


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The new tokens of one choice of one request in one step (speculation may give several)."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None  # set on the choice's last chunk


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a request cost the engine: immutable, sent once, kept until a gateway acknowledges it.

    prompt = cached + computed always, also after an abort: a prompt that was not wholly computed
    reports only the part that was, as `prompt`, and the rest as `unprocessed`.
    """

    request_id: str
    namespace: str
    adapter: str | None
    prompt: int
    cached: int  # frozen at first admission
    computed: int
    unprocessed: int  # prompt tokens never reached because the request ended first
    generated: int  # over all choices
    delivered: int  # handed to the gateway
    recomputed: int  # again after preemption; on the house
    discarded: int  # overlap's extra step, rejected drafts; on the house
    finish_reason: FinishReason
    queue_s: float
    prefill_s: float
    decode_s: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything one engine step has for one gateway: one message a step, not one a request."""

    step: int
    chunks: list[TokenChunk]
    receipts: list[Receipt]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request or adapter that the engine does not take, with the numbers that say why."""

    request_id: str
    code: str  # context_length_exceeded, queue_full, adapter_not_found, invalid_request, ...
    message: str


@dataclass(frozen=True, slots=True)
class AdapterState:
    """Where an adapter's weights are: absent, host, loading, resident or draining; `gone` in a
    heartbeat says that the engine no longer knows it."""

    digest: str
    state: str
    rank: int
    generation: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Blocks stored in or removed from the prefix cache, for routers. Hashes are hex. `cleared` is
    the client's own word: what was told before no longer holds."""

    kind: str  # stored | removed | cleared
    hashes: list[str]
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine serves; sent on connect."""

    engine_id: str
    model: str
    base_digest: str
    context_length: int
    vocab_size: int
    block_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    max_lora_rank: int
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # routers name blocks as the engine does


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The heartbeat: load as a router sees it. A welcome lists every adapter, a heartbeat those that
    changed since the one before: an engine may know thousands."""

    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    tokens_waiting: int
    adapters: list[AdapterState] = field(default_factory=list)
    draining: bool = False
