"""What each provider of OpenAI's form has of its own, as a table.

`usage` fields that are not OpenAI's own are listed by the part of the canonical split that they are;
`beside` says that the reported output has no reasoning, which is billed as output all the same.
"""

from collections.abc import Mapping
from types import MappingProxyType

from msgspec import Struct

_ALL = frozenset(("tools", "json", "images", "documents", "audio", "embeddings"))
_TEXT = frozenset(("tools", "json"))
_EFFORT = frozenset(("reasoning_effort",))


class Dialect(Struct, frozen=True):
    name: str
    path: str = "/v1"
    header: str = "authorization"  # which carries the key; `authorization` as a bearer's
    capabilities: frozenset[str] = _TEXT
    parameters: frozenset[str] = frozenset()
    refused: tuple[str, ...] = ()  # of OpenAI's own parameters
    renamed: Mapping[str, str] = {}
    stream_usage: bool = True  # it takes `stream_options`
    read: tuple[str, ...] = ()  # fields of `usage` with the tokens read from a cache
    beside: bool = False
    holder: tuple[str, ...] = ()  # where a stream's `usage` stands, if not in its chunk
    details_back: bool = False  # `reasoning_details` of earlier answers go back as they came


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        each.name: each
        for each in (
            Dialect(
                "openai",
                capabilities=_ALL,
                parameters=_EFFORT | {"prediction", "service_tier"},
                renamed={"max_tokens": "max_completion_tokens"},
            ),
            Dialect(
                "azure",
                path="",
                header="api-key",
                capabilities=_ALL,
                parameters=_EFFORT | {"prediction"},
                renamed={"max_tokens": "max_completion_tokens"},
            ),
            Dialect(
                "mistral",
                capabilities=_TEXT | {"images", "documents", "embeddings"},
                parameters=frozenset(("continue_final_message",)),
                refused=("logprobs", "logit_bias"),
                renamed={"seed": "random_seed"},
                stream_usage=False,
                read=("num_cached_tokens",),
            ),
            Dialect(
                "groq",
                path="/openai/v1",
                capabilities=_TEXT | {"images"},
                parameters=_EFFORT | {"service_tier"},
                refused=("logprobs", "logit_bias", "n"),
                renamed={"max_tokens": "max_completion_tokens"},
                holder=("x_groq",),
            ),
            Dialect(
                "together",
                capabilities=_TEXT | {"images", "embeddings"},
                parameters=frozenset(("top_k", "min_p", "repetition_penalty", "reasoning_effort")),
                read=("cached_tokens",),
            ),
            Dialect(
                "fireworks",
                path="/inference/v1",
                capabilities=_TEXT | {"images", "embeddings"},
                parameters=frozenset(("top_k", "min_p", "repetition_penalty", "reasoning_effort")),
            ),
            Dialect(
                "deepseek",
                refused=("seed", "n", "logit_bias"),
                parameters=_EFFORT,
                read=("prompt_cache_hit_tokens",),
            ),
            Dialect(
                "xai",
                capabilities=_TEXT | {"images"},
                parameters=_EFFORT,
                refused=("logit_bias",),
                beside=True,
            ),
            Dialect(
                "openrouter",
                path="/api/v1",
                capabilities=_TEXT | {"images", "audio", "documents"},
                parameters=frozenset(("top_k", "min_p", "repetition_penalty", "reasoning_effort")),
                refused=("n",),
                details_back=True,
            ),
        )
    }
)
