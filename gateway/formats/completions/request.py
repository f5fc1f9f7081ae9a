"""The body of /v1/completions and its conversion to an `InferenceRequest`."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from core.errors import BadRequest
from gateway.edge.decoding import check_label, decode_open, given_names, refuse_unsupported
from gateway.formats.sampling import (
    Count,
    Positive,
    SamplingBody,
    check_logprob_ids,
    check_stream_options,
    chosen_at_the_end,
    not_streamed,
    sampling_of,
    structured_of,
)
from gateway.request.inference import InferenceRequest

ROUTE = "/v1/completions"
_DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_BEST_OF = 20  # OpenAI's
MAX_CHOICES_PER_REQUEST = 128  # per request: prompts times n


class CompletionBody(SamplingBody, kw_only=True):
    model: Annotated[str, Meta(min_length=1, max_length=300)]
    prompt: str | list[Any]
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Positive | None = None
    suffix: str | None = None
    metadata: dict[str, str] | None = None


_decoder = msgspec.json.Decoder(CompletionBody)
_ids = msgspec.json.Decoder(list[Count])


def parse_completion(raw: bytes) -> InferenceRequest:
    extra_fields: dict[str, Any] = {}
    body = decode_open(_decoder, raw, extra_fields)
    refuse_unsupported(body, {"suffix": ("",)})
    check_stream_options(body)
    _check_best_of(body)
    check_logprob_ids(body, scored=body.logprobs is not None and body.max_tokens != 0)
    options = sampling_of(body, given_names(body))
    if body.echo and body.logprobs is not None:
        if body.stream:
            raise not_streamed("echo")
        options["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    if body.max_tokens == 0 and options.get("prompt_logprobs") is None:
        raise BadRequest(
            "max_tokens is 0, and nothing is asked of the prompt.",
            next_step="Set max_tokens to at least 1, or ask for echo with logprobs.",
            param="max_tokens",
            code="invalid_value",
        )
    structured, named = structured_of(body)
    return InferenceRequest(
        route=ROUTE,
        model=body.model,
        prompts=_prompts(body.prompt, body.n or 1),
        max_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        clamp_max_tokens=body.max_tokens is None,
        logprobs=body.logprobs,
        echo=bool(body.echo),
        engine_parameters=structured,
        extra_fields=extra_fields,
        end_user=check_label("user", body.user),
        best_of=None if body.best_of == (body.n or 1) else body.best_of,
        extra={"prompt_logprobs": body.prompt_logprobs, "named": named},
        **options,
    )


def _check_best_of(body: CompletionBody) -> None:
    if body.best_of is None or body.best_of == (body.n or 1):
        return
    if body.best_of < (body.n or 1) or body.best_of > MAX_BEST_OF:
        raise BadRequest(
            f"best_of is {body.best_of}; it must be between n={body.n or 1} and {MAX_BEST_OF}.",
            next_step="Raise best_of, or lower n.",
            param="best_of",
            code="invalid_value",
        )
    if body.stream:
        raise chosen_at_the_end("best_of")


def _prompts(given: str | list[Any], n: int) -> tuple[str | list[int], ...]:
    """Accepts a string, a list of token ids, or a list of either."""
    if isinstance(given, str):
        return (given,)
    if given and all(map(_is_id, given)):
        return (list(given),)
    alike = (all(isinstance(each, kind) for each in given) for kind in (str, list))
    if not given or not any(alike) or not all(map(_is_prompt, given)):
        raise BadRequest(
            "prompt must be a string, a list of token ids, or a list of strings or of such lists.",
            next_step="Send strings, or lists of integers of at least 0, not both.",
            param="prompt",
            code="invalid_type",
        )
    if len(given) * n > MAX_CHOICES_PER_REQUEST:
        raise BadRequest(
            f"{len(given)} prompts with n={n} make {len(given) * n} choices; a request may have at most"
            f" {MAX_CHOICES_PER_REQUEST}.",
            next_step="Send fewer prompts per request, or lower n.",
            param="prompt",
            code="invalid_value",
        )
    return tuple(given)


def _is_prompt(given: Any) -> bool:
    return isinstance(given, str) or (bool(given) and all(map(_is_id, given)))


def _is_id(given: Any) -> bool:
    return type(given) is int and given >= 0
