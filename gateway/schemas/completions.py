"""The body of /v1/completions and how it becomes an Ask."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import UnsupportedParameter
from gateway.ask import Ask
from gateway.schemas.decoding import clean_label, decode, refuse_unsupported
from gateway.schemas.sampling import (
    Count,
    Positive,
    SamplingBody,
    refused_stream_options,
    sampling_of,
)

ROUTE = "/v1/completions"
_DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionBody(SamplingBody, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    prompt: str | list[Any]
    max_tokens: Positive | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None


_decoder = msgspec.json.Decoder(CompletionBody)
_ids = msgspec.json.Decoder(list[Count])


def parse_completion(raw: bytes) -> Ask:
    body = decode(_decoder, raw)
    refuse_unsupported(body, {"suffix": ("",), "best_of": (1, body.n or 1)})
    refused_stream_options(body)
    return Ask(
        route=ROUTE,
        model=body.model,
        prompt=_one_prompt(body.prompt),
        max_tokens=body.max_tokens or _DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        end_user=clean_label("user", body.user),
        **sampling_of(body),
    )


def _one_prompt(given: str | list[Any]) -> str | list[int]:
    """A text, a list of token ids, or a list with one of either."""
    if isinstance(given, str):
        return given
    if len(given) == 1 and isinstance(given[0], str | list):
        return _one_prompt(given[0])
    if given and all(type(each) is int and each >= 0 for each in given):
        return list(given)
    raise UnsupportedParameter(
        "prompt takes one prompt a request: a text, or a list of token ids.",
        next_step="Send one request for each prompt.",
        param="prompt",
    )
