"""What a client asked for, in one form for every surface."""

from typing import Any

from msgspec import Struct, field


class Ask(Struct, frozen=True):
    """One inference request, validated, not yet admitted. Numbers are None where not given."""

    route: str
    model: str
    messages: list[dict[str, Any]] | None = None  # a chat; else `prompts`
    prompts: tuple[str | list[int], ...] = ()  # raw ones: each is answered by choices of its own
    spoken: tuple[str, ...] = ()  # what prompts of token ids say, for the safety desk
    inputs: list[str] | list[list[int]] | None = None  # texts to embed, in place of prompts
    tools: list[dict[str, Any]] | None = None
    one_call: bool = False  # of a tool in one answer, at most
    # Parameters that only some engines can honour, in OpenAI's form for chats.
    beyond: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    n: int = 1  # choices for each prompt
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    logprobs: int | None = None  # alternatives beside the chosen token; None is off
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    echo: bool = False
    end_user: str | None = None
    truncation: str = "disabled"
    dropped: str | None = None  # what truncation took away: "turns=2, blocks=1"
    timeout_s: float | None = None
    client_request_id: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # what one surface alone needs to answer

    @property
    def choices(self) -> int:
        """Of the whole answer, prompt by prompt."""
        return self.n * max(1, len(self.prompts))


class Usage(Struct, frozen=True):
    """What the client is told, and what is billed."""

    prompt: int
    cached: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output
