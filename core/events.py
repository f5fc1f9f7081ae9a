"""Frozen records that cross packages: what the gateway passes to billing and moderation."""

from datetime import datetime
from enum import StrEnum
from operator import attrgetter

from msgspec import Struct, structs


class UsageKind(StrEnum):
    GENERATION = "generation"
    MODERATION = "moderation"  # a call of /v1/moderations
    EMBEDDING = "embedding"
    CACHE_HIT = "cache_hit"  # answered from the tenant's response cache, without an engine
    AUDIO = "audio"  # transcribed or translated; `units` counts seconds
    SPEECH = "speech"  # `units` counts characters that were spoken
    IMAGE = "image"  # `units` counts images that were made
    GPU_SECONDS = "gpu_seconds"  # dedicated capacity; `quantity` counts seconds


class SettledBy(StrEnum):
    GATEWAY = "gateway"  # counted by the gateway when the request ended
    RECEIPT = "receipt"  # the gateway died; counted from the engine's receipt
    EXPIRY = "expiry"  # no receipt either: closed with zero output
    REPORTED = "reported"  # not served here: reported to /admin/v1/events


class CountedBy(StrEnum):
    ENGINE = "engine"  # our engine: by its receipt
    GATEWAY = (
        "gateway"  # our engine, whose receipt did not come in time: as the gateway received them
    )
    UPSTREAM = "upstream"  # the usage that an OpenAI-compatible server reported
    TOKENIZER = "tokenizer"  # such a server's text, by the model's tokenizer
    ESTIMATE = "estimate"  # such a server's text, by its bytes


class OpenedRequest(Struct, frozen=True):
    """Written durably before the first token is sent. Pins everything that rating needs."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    kind: UsageKind
    route: str  # "/v1/chat/completions"
    model: str  # public name of the base model
    adapter: str | None  # public name of the adapter
    adapter_digest: str | None
    price_version: str  # pinned at admission and used for rating
    opened_at: datetime
    prompt_tokens: int
    engine_id: str = ""
    member_id: str | None = None
    end_user: str | None = None  # the client's own `user` field: correlation only
    client_request_id: str | None = None  # the client's x-request-id: correlation only
    batch_job: str | None = None  # id of the batch, for a line of /v1/batches
    prompts: int = 1  # of /v1/completions; the engine knows each under its own id
    labels: str | None = None  # in their canonical form: see `core.labels`

    @property
    def engine_request_ids(self) -> tuple[str, ...]:
        return engine_request_ids(self.request_id, self.prompts)


def engine_request_ids(request_id: str, prompts: int) -> tuple[str, ...]:
    """The ids under which an engine knows a request: one per prompt."""
    if prompts == 1:
        return (request_id,)
    return tuple(f"{request_id}.{number}" for number in range(prompts))


class Components(Struct, frozen=True, omit_defaults=True):
    """How the totals of a usage event divide, where a provider tells. Token counts, unless said
    otherwise. No token is in two of them: what a cache held is in none, and what is in none is plain
    input or plain output."""

    cache_write_5m: int = 0  # input kept for the provider's usual time
    cache_write_1h: int = 0  # input kept for an hour
    audio_input: int = 0
    image_input: int = 0
    reasoning: int = 0  # output
    audio_output: int = 0
    image_output: int = 0
    search: int = 0  # searches of the web by the provider's own tool
    tool_call: int = 0  # calls of the provider's other tools

    @property
    def input_tokens(self) -> int:
        return self.cache_write_5m + self.cache_write_1h + self.audio_input + self.image_input

    @property
    def output_tokens(self) -> int:
        return self.reasoning + self.audio_output + self.image_output

    def within(self, uncached_input: int, output: int) -> "Components":
        """As much of it as totals have: of more, the later ones are cut."""
        left = [uncached_input, output]
        kept = {}
        for name in self.__struct_fields__:
            count = getattr(self, name)
            if count and name not in UNITS:
                side = int(name in OF_OUTPUT)
                count = min(count, left[side])
                left[side] -= count
            kept[name] = count
        return Components(**kept)


UNITS = ("search", "tool_call")
OF_OUTPUT = ("reasoning", "audio_output", "image_output")


class UsageEvent(Struct, frozen=True):
    """A finished request: exactly one for every OpenedRequest.

    input_tokens includes cached_tokens. output_tokens were delivered to the client and are billed;
    waived_tokens were generated but not delivered: generated = output + waived. `components` divide
    the totals and add nothing to them.
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
    occurred_at: datetime  # time of admission; decides the billing period
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
    reordered_cached_tokens: int = 0  # cached tokens gained by prompt order
    truncated: str | None = None  # parts dropped to fit the context: "turns=2, blocks=1, tokens=90"
    batch_job: str | None = None
    routed: str | None = None  # why this engine was chosen, and which failed before it
    paid_by: str | None = None  # tenant or operator: who pays for what the policy blocked or cut
    counted_by: CountedBy | None = None  # what counted the tokens; None: no engine ran
    busy_us: int = 0  # microseconds of the engine's steps; 0: it did not measure them
    units: int = 0  # seconds, characters or images, by kind
    components: Components | None = None  # None: all input and output is plain
    labels: str | None = None  # in their canonical form: see `core.labels`

    def __post_init__(self) -> None:
        counts = _counts_of(self)
        if set(map(type, counts)) != _INTEGERS or min(counts) < 0:
            wrong = [each for each in counts if type(each) is not int or each < 0]
            raise ValueError(
                f"{self.request_id}: token counts, busy_us and units must be non-negative integers:"
                f" {wrong[0]}"
            )
        if self.cached_tokens > self.input_tokens:
            raise ValueError(
                f"{self.request_id}: {self.cached_tokens} cached tokens exceed"
                f" {self.input_tokens} input tokens"
            )
        if self.components is not None:
            self._check(self.components)

    def _check(self, parts: Components) -> None:
        if any(type(each) is not int or each < 0 for each in structs.astuple(parts)):
            raise ValueError(
                f"{self.request_id}: components must be non-negative integers: {parts}"
            )
        for side, total, sum_ in (
            ("uncached input", self.input_tokens - self.cached_tokens, parts.input_tokens),
            ("output", self.output_tokens, parts.output_tokens),
        ):
            if sum_ > total:
                raise ValueError(
                    f"{self.request_id}: components of {sum_} tokens exceed {total} {side} tokens"
                )


_INTEGERS = {int}
_counts_of = attrgetter(
    "input_tokens", "cached_tokens", "output_tokens", "waived_tokens", "busy_us", "units"
)


class EngineCount(Struct, frozen=True):
    """Token counts and busy time of an engine's receipt, sent independently of the usage event:
    spooled as they arrive, however the request ends. The audit compares them with the usage event."""

    request_id: str  # by which the engine knows it: of several prompts, the number follows a dot
    engine_id: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    received_at: datetime
    busy_us: int = 0


WARM_UP = "warm_up"  # finish reason of a start's own request, which is nobody's usage


class ModerationEvent(Struct, frozen=True):
    """One decision of the screener or the guard, without text: a hash, spans and scores."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    at: datetime
    direction: str  # input | output
    action: str  # allow | annotate | redact | block
    policy_version: str
    text_sha256: str
    categories: tuple[str, ...]  # categories over their threshold
    scores: dict[str, float]
    spans: tuple[tuple[int, int, str], ...] = ()  # start, end, label; code points of the text
    view: str = "plain"  # the text view that matched: plain or folded
    unscanned: bool = False
