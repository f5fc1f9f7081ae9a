"""An inference request in the form that all API surfaces share."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from msgspec import Struct, field

from gateway.request.prompt_references import PromptReference

RERANK_ROUTE = "/v1/rerank"
SCORE_ROUTE = "/v1/score"


class InferenceRequest(Struct, frozen=True):
    """A validated inference request, before admission. Numbers are None when not given."""

    route: str
    model: str
    messages: list[dict[str, Any]] | None = None  # a chat; otherwise `prompts` is set
    prompts: tuple[str | list[int], ...] = ()  # raw prompts; each gets `n` choices
    decoded_prompts: tuple[str, ...] = ()  # decoded token-id prompts, for moderation
    inputs: list[str] | list[list[int]] | None = None  # texts to embed, in place of prompts
    tools: list[dict[str, Any]] | None = None
    single_tool_call: bool = False  # at most one tool call per choice
    # Parameters that only some engines support, in the format of OpenAI's chat API.
    engine_parameters: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    clamp_max_tokens: bool = (
        False  # to what the context leaves: the client did not choose the number
    )
    n: int = 1  # choices for each prompt
    best_of: int | None = None  # choices that are generated for each prompt; None: `n`
    use_beam_search: bool = False
    length_penalty: float | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False  # a running count on every chunk
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: tuple[str, ...] | None = None  # None: the usual ones
    lz_penalty: float | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # number of alternatives to the chosen token; None is off
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None  # only so many of the prompt's last tokens are read
    truncation_side: str = "left"  # where `truncate_prompt_tokens` cuts
    return_tokens_as_token_ids: bool = False  # log-probabilities name tokens by id
    return_token_ids: bool = False  # also return the ids of prompt and answer
    logprob_token_ids: tuple[int, ...] = ()  # log-probabilities of these, in place of the likeliest
    include_reasoning: bool = True  # in a chat's answer, where the model writes any
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    echo: bool = False  # the prompt, or a chat's last assistant message, before the answer
    continue_final_message: bool = False  # the answer continues the last message
    end_user: str | None = None  # by whom usage is counted
    safety_identifier: str | None = None  # a second name of the end user
    metadata: dict[str, str] | None = None  # of which the project's labels are counted by
    truncation: str = "disabled"
    dropped: str | None = None  # what truncation removed: "turns=2, blocks=1"
    timeout_s: float | None = None
    client_request_id: str | None = None
    reasoning_effort: str | None = None
    # Of a tool loop's turns, after the last message of the user: the reasoning before the calls, by
    # the id of the first of them. Empty for a model whose upstreams do not take it.
    tool_reasoning: dict[str, str] = field(default_factory=dict)
    prediction: Any = None
    service_tier: str | None = None
    prompt: PromptReference | None = None  # a template, whose messages are not in `messages` yet
    # Fields that no route knows, for an upstream whose entry declares them.
    extra_fields: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(
        default_factory=dict
    )  # data that one surface needs to build its response

    @property
    def lists_numbers(self) -> bool:
        """Whether the answer holds hundreds of bytes for each token."""
        return (self.inputs, self.logprobs, self.prompt_logprobs) != (None, None, None)

    @property
    def choices(self) -> int:
        """Number of choices over all prompts, grouped by prompt."""
        return self.n * (len(self.prompts) or 1)

    @property
    def candidates(self) -> int:
        """Number of answers that are generated, of which `choices` are delivered."""
        return max(self.n, self.best_of or 0) * (len(self.prompts) or 1)


class Usage(Struct, frozen=True):
    """Token counts, as reported to the client and as billed."""

    prompt: int
    cached: int
    output: int
    reasoning: int = 0  # of `output`
    # Guesses that the engine made for a request with a prediction: those among `output`, and wrong
    # ones, which cost nothing.
    accepted: int = 0
    rejected: int = 0
    cache_write: int = 0  # of the uncached prompt: kept in a provider's cache for its usual time
    cache_write_long: int = 0  # the same, kept for an hour

    @property
    def total(self) -> int:
        return self.prompt + self.output


# Parameters beyond OpenAI's, each with its value when it is not set.
EXTRA: Mapping[str, Any] = MappingProxyType(
    {
        name: getattr(InferenceRequest("", ""), name)
        for name in (
            "top_k",
            "min_p",
            "typical_p",
            "top_n_sigma",
            "dry_multiplier",
            "dry_base",
            "dry_allowed_length",
            "dry_sequence_breakers",
            "lz_penalty",
            "best_of",
            "use_beam_search",
            "length_penalty",
            "bad_words",
            "allowed_token_ids",
            "repetition_penalty",
            "stop_token_ids",
            "min_tokens",
            "ignore_eos",
            "include_stop_str_in_output",
            "truncate_prompt_tokens",
            "truncation_side",
            "logprob_token_ids",
            "chat_template_kwargs",
            "continue_final_message",
            "reasoning_effort",
            "prediction",
            "service_tier",
        )
    }
)


# Of these, hints to the model that an upstream's entry may list in its `extra_fields`.
PASSED = ("verbosity", "prompt_cache_retention", "prompt_cache_options")
