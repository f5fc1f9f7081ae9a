"""Plain records between the gateway and the engine: requests, output and receipts for billing.

Everything here is data. The wire format (msgpack over ZeroMQ) is in `engine/worker/wire.py`, so that the
library needs neither package.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence or stop id was sampled
    LENGTH = "length"  # max_tokens or the end of the context was reached
    ABORT = "abort"  # the gateway aborted the request
    DEADLINE = "deadline"  # the request's deadline passed
    ERROR = "error"  # the engine failed; see the receipt's message


WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # why a whole answer ends


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must match."""

    kind: str  # json_schema, regex, lark, gbnf, or choice: a JSON list of strings
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Applied in the order that `engine/decoding/sampling.py` describes."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0  # 1 is off; arXiv 2202.00666
    top_n_sigma: float = 0.0  # 0 is off; arXiv 2411.07641
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0 is off; see `engine/decoding/repeats.py`
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # repeats of so many tokens are not penalised
    dry_breakers: tuple[int, ...] = ()  # ids that no repeat reaches across
    lz_penalty: float = 0.0  # 0 is off; arXiv 2504.20131
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids that are never completed
    allowed_token_ids: tuple[int, ...] = ()  # no others are sampled; empty is off
    grammar: Grammar | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None  # number of top alternatives to the chosen id; None is off
    # The same for the prompt's tokens; `max_tokens` may be 0 then.
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    # An embedding of the prompt in place of tokens: last, mean or cls, or `model`: as its files say.
    pooling: str = ""
    best_of: int = 0  # choices that are sampled, of which the `n` likeliest are delivered; 0: `n`
    use_beam_search: bool = False  # `n` beams; see `engine/outputs/beams.py`
    length_penalty: float = 1.0  # of beam search
    # With `logprobs`: the alternatives are these ids, and the chosen one, in place of the top ones.
    logprob_token_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class GenerateRequest:
    """One request of an authenticated gateway, which has checked every field set by a client."""

    request_id: str
    namespace: str  # the tenant: root of its prefix cache and its key in fair scheduling
    prompt: list[int]
    sampling: SamplingParams
    adapter: str | None = None  # the adapter's digest, lower-case hex (`adapter_digest`)
    weight: float = 1.0  # the tenant's share against other tenants
    priority: int = 0  # higher goes first
    deadline_s: float | None = None  # seconds from arrival at the engine
    note: str = ""  # the gateway's own; it comes back in the receipt
    # Ids that the answer is expected to repeat. Only guesses are made of them.
    prediction: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """What the model itself gave a prompt token, before any change to its logits. The first token
    has no log-probability."""

    token: int
    logprob: float | None = None
    rank: int = 0  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """The new tokens of one choice of one request in one step."""

    request_id: str
    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None  # set on the choice's last chunk
    prompt_logprobs: list[PromptLogprob] | None = None  # on the first chunk of choice 0
    embedding: bytes | None = None  # 32-bit little-endian floats, not normalised


@dataclass(slots=True)
class Receipt:
    """The tokens that a request used. Nothing changes it; kept until a gateway acknowledges it.

    prompt = cached + computed always holds, also after an abort: of a prompt that was not fully
    computed, `prompt` counts the processed part and `unprocessed` the rest.
    """

    request_id: str
    namespace: str
    adapter: str | None
    prompt: int
    cached: int  # frozen at first admission
    computed: int
    unprocessed: int  # prompt tokens never reached because the request ended first
    generated: int  # over all choices
    delivered: int  # sent to the gateway
    recomputed: int  # computed again after a preemption; not charged
    discarded: int  # sampled after the end, by the overlapped step; not charged
    finish_reason: FinishReason
    queue_s: float
    prefill_s: float
    decode_s: float
    message: str = ""
    rejected: int = 0  # guesses of speculative decoding that proved wrong; not charged
    accepted: int = 0  # those that proved right: they are among `generated`
    note: str = ""  # of the request
    busy_us: int = 0  # its share of the steps' measured time, by work, in microseconds
    dropped: int = 0  # positions that its last tokens did not see, by the engine's `kv_window`


@dataclass(frozen=True, slots=True)
class StepOutput:
    """All output of one engine step for one gateway: one message per step, not per request."""

    step: int
    chunks: list[TokenChunk]
    receipts: list[Receipt]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request or adapter that the engine refuses, and why."""

    request_id: str
    code: str  # context_length_exceeded, queue_full, adapter_not_found, invalid_request, ...
    message: str


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The state of an adapter's weights: absent, host, loading, resident or draining; in a
    heartbeat, `gone` means that the engine has removed it."""

    digest: str
    state: str
    rank: int
    generation: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Blocks stored in or removed from the prefix cache, for routers. Hashes are hex. The client
    itself adds `cleared`: all events before it are void."""

    kind: str  # stored | removed | cleared
    hashes: list[str]
    parent: str | None = None
    tier: str = ""  # of copies outside the pool: ram, disk or remote


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
    dtype: str  # that it computes in; after a slash, what keys and values are stored in, if another
    max_lora_rank: int
    tokenizer_digest: str  # of the checkpoint's; empty where it has none
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # routers need them to compute block keys
    pooling: str = ""  # of embeddings, unless a request names one; empty: it computes none
    batch_invariant: bool = False  # answers do not depend on what else is in the batch


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The heartbeat: the engine's load, for routers. A Welcome lists every adapter, a heartbeat
    only those that changed since the one before, because an engine may have thousands."""

    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    tokens_waiting: int
    adapters: list[AdapterState] = field(default_factory=list)
    draining: bool = False
