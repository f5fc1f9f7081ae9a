"""Frozen records that cross packages: what the door hands to the counting-house and the safety desk."""

from datetime import datetime
from enum import StrEnum

from msgspec import Struct


class UsageKind(StrEnum):
    GENERATION = "generation"
    MODERATION = "moderation"  # a call of /v1/moderations
    EMBEDDING = "embedding"
    GPU_SECONDS = "gpu_seconds"  # dedicated capacity; `quantity` counts seconds


class SettledBy(StrEnum):
    GATEWAY = "gateway"  # the stream ended and the door counted
    RECEIPT = "receipt"  # the door died; the engine's receipt says what it did
    EXPIRY = "expiry"  # neither came back: closed at zero output, everything waived


class OpenedRequest(Struct, frozen=True):
    """Written durably before the first token leaves. Everything that rating needs is pinned here."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    kind: UsageKind
    route: str  # "/v1/chat/completions"
    model: str  # public name of the base model
    adapter: str | None  # public name of the adapter
    adapter_digest: str | None
    price_version: str  # pinned at admission; rating uses no other
    opened_at: datetime
    prompt_tokens: int
    engine_id: str = ""
    member_id: str | None = None
    end_user: str | None = None  # the client's own `user` field: correlation only
    client_request_id: str | None = None  # the client's x-request-id: correlation only
    batch_job: str | None = None  # the batch of /v1/batches that this was a line of
    prompts: int = 1  # raw ones, each of which the engine has under a name of its own

    @property
    def engine_names(self) -> tuple[str, ...]:
        return engine_names(self.request_id, self.prompts)


def engine_names(request_id: str, prompts: int) -> tuple[str, ...]:
    """Under which an engine knows a request: one for each of its prompts."""
    if prompts == 1:
        return (request_id,)
    return tuple(f"{request_id}.{number}" for number in range(prompts))


class UsageEvent(Struct, frozen=True):
    """One request, ended: exactly one of these for every OpenedRequest.

    input_tokens includes cached_tokens. output_tokens were delivered to the client and are billed;
    waived_tokens were generated and not delivered: generated = output + waived.
    """

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    kind: UsageKind
    route: str
    model: str
    adapter: str | None
    adapter_digest: str | None
    price_version: str
    occurred_at: datetime  # admission: decides the billing period
    finished_at: datetime
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    waived_tokens: int
    finish_reason: str
    status: int  # HTTP status of the answer
    settled_by: SettledBy = SettledBy.GATEWAY
    quantity: int = 1  # requests for most kinds, seconds for GPU_SECONDS
    streamed: bool = False
    first_token_ms: int | None = None
    duration_ms: int = 0
    queue_ms: int = 0
    engine_id: str = ""
    member_id: str | None = None
    end_user: str | None = None
    client_request_id: str | None = None
    moderation: str | None = None  # strongest action taken: annotate, redact, block, unscanned
    prompt_order: str | None = None  # off, safe or full, and whether it changed anything
    reordered_cached_tokens: int = 0  # cached tokens owed to prompt order
    truncated: str | None = None  # what was dropped to fit the context: "turns=2, blocks=1"
    batch_job: str | None = None
    routed: str | None = None  # why that engine, in words; what was tried before it
    paid_by: str | None = None  # tenant or house: who bears what the policy blocked or cut

    def __post_init__(self) -> None:
        counts = (self.input_tokens, self.cached_tokens, self.output_tokens, self.waived_tokens)
        for count in counts:
            if type(count) is not int or count < 0:
                raise ValueError(
                    f"{self.request_id}: token counts are whole and not negative: {counts}"
                )
        if self.cached_tokens > self.input_tokens:
            raise ValueError(f"{self.request_id}: more cached tokens than input tokens")


class EngineCount(Struct, frozen=True):
    """What an engine says that it did for a request; compared with the event by the audit."""

    request_id: str
    engine_id: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    received_at: datetime


class ModerationEvent(Struct, frozen=True):
    """One decision of the screen or the guard. No text: a hash, spans and scores."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    at: datetime
    direction: str  # input | output
    action: str  # allow | annotate | redact | block
    policy_version: str
    text_sha256: str
    categories: tuple[str, ...]  # that fired
    scores: dict[str, float]
    spans: tuple[tuple[int, int, str], ...] = ()  # start, end, label; code points of the text
    view: str = "plain"  # which view fired: plain or folded
    unscanned: bool = False
