"""The parameters that all text surfaces share, and their conversion for `InferenceRequest`."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from core import lengths
from core.errors import BadRequest, UnsupportedParameter
from gateway.edge.decoding import Request, check_label, check_range

MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Words = Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=256)]


class StreamOptions(Request):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's


class SamplingBody(Request):
    """Sampling parameters under OpenAI's names, and engine parameters that OpenAI lacks."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: Annotated[int, Meta(ge=1, le=100)] | None = None
    dry_sequence_breakers: Words | None = None
    lz_penalty: float | None = None
    bad_words: Words | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1, max_length=100_000)] | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    length_penalty: float | None = None  # vLLM's
    seed: int | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    use_beam_search: bool | None = None  # vLLM's
    stop: str | list[str] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=64)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Positive | None = None
    truncation_side: Literal["left", "right"] | None = None  # vLLM's, as is the next
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    logprob_token_ids: Annotated[list[Count], Meta(max_length=MAX_LOGPROB_IDS)] | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None


def sampling_of(body: SamplingBody, given: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of `InferenceRequest`. `given`: the names of the fields that are set, in their
    order: others cost nothing."""
    arguments = streaming_of(body)
    if not given:
        return arguments
    for name in given:
        if name in _RANGES:
            value = arguments[name] = getattr(body, name)
            check_range(name, value, *_RANGES[name])
        elif name in _CONVERTED:
            renamed, converted = _CONVERTED[name]
            value = getattr(body, name)
            arguments[renamed] = value if converted is None else converted(value)
    return arguments


def streaming_of(body: SamplingBody) -> dict[str, Any]:
    """Those that say whether and how the answer is streamed."""
    options = body.stream_options
    if options is None:
        return {"stream": bool(body.stream)}
    return {
        "stream": bool(body.stream),
        "include_usage": bool(options.include_usage),
        "continuous_usage": bool(options.include_usage and options.continuous_usage_stats),
    }


def client_id_of(given: str | None) -> str | None:
    """The client's own id of its request, as it may also send it in x-request-id."""
    return check_label("request_id", given or None, lengths.CLIENT_REQUEST_ID)


def stops_of(name: str, value: str | list[str] | None) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    if len(stops) > MAX_STOPS or any(not 0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise BadRequest(
            f"{name} takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters; "
            f"got {len(stops)}.",
            next_step=f"Shorten {name}.",
            param=name,
            code="invalid_value",
        )
    return stops


def _biases(given: dict[str, float] | None) -> dict[int, float]:
    if not given:
        return {}
    if len(given) > 1024:
        raise BadRequest(
            "logit_bias takes at most 1,024 tokens.", param="logit_bias", code="invalid_value"
        )
    biases: dict[int, float] = {}
    wrong = [
        repr(token[:40])
        for token in given
        if not (token.isascii() and token.isdecimal()) or len(token) > 9
    ]
    for token, bias in given.items():
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            what = "which is not a token id" if len(wrong) == 1 else "which are not token ids"
            raise BadRequest(
                f"logit_bias has {', '.join(wrong[:5])}{more}, {what}.",
                next_step="Use token ids as keys; /tokenize gives them.",
                param="logit_bias",
                code="invalid_value",
            )
        check_range("logit_bias", bias, -100, 100)
        biases[int(token)] = bias
    return biases


def _once(ids: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))


# Both are in field order, which is also the order of error messages: ranges come first.
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "typical_p": (0.001, 1),
    "top_n_sigma": (0, 100),
    "dry_multiplier": (0, 100),
    "dry_base": (1, 4),
    "lz_penalty": (0, 10),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "length_penalty": (-10, 10),
    "seed": (-(2**63), 2**63 - 1),
}
# The name in `InferenceRequest`, and the conversion if there is one.
_CONVERTED: dict[str, tuple[str, Callable[[Any], Any] | None]] = {
    "top_k": ("top_k", partial(max, 0)),
    "dry_allowed_length": ("dry_allowed_length", None),
    "dry_sequence_breakers": ("dry_sequence_breakers", tuple),
    "bad_words": ("bad_words", tuple),
    "allowed_token_ids": ("allowed_token_ids", tuple),
    "logit_bias": ("logit_bias", _biases),
    "n": ("n", None),
    "use_beam_search": ("use_beam_search", None),
    "stop": ("stop", partial(stops_of, "stop")),
    "prompt_logprobs": ("prompt_logprobs", None),
    "stop_token_ids": ("stop_token_ids", tuple),
    "min_tokens": ("min_tokens", None),
    "ignore_eos": ("ignore_eos", None),
    "include_stop_str_in_output": ("include_stop_str_in_output", None),
    "truncate_prompt_tokens": ("truncate_prompt_tokens", None),
    "truncation_side": ("truncation_side", None),
    "return_tokens_as_token_ids": ("return_tokens_as_token_ids", None),
    "return_token_ids": ("return_token_ids", None),
    "logprob_token_ids": ("logprob_token_ids", _once),
    "request_id": ("client_request_id", client_id_of),
}
# Fields that are checked by themselves alone, but for what `check_stream_options` looks at.
CHECKED_ALONE = (_RANGES.keys() | _CONVERTED.keys()) - {"logprob_token_ids"}


def tier_of(given: str | None) -> str | None:
    """None: the plan's own priority and price."""
    return None if given in ("auto", "default") else given


def check_stream_options(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise BadRequest(
            "stream_options needs stream to be true.",
            next_step="Set stream, or leave stream_options out.",
            param="stream_options",
            code="invalid_value",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise not_streamed("prompt_logprobs")
    if body.use_beam_search and body.stream:
        raise chosen_at_the_end("use_beam_search")


def check_logprob_ids(body: SamplingBody, *, scored: bool) -> None:
    """`scored`: the request asks for log-probabilities of generated tokens."""
    if not body.logprob_token_ids or (scored and not body.use_beam_search):
        return
    why = "is not supported with beam search" if body.use_beam_search else "needs logprobs"
    raise BadRequest(
        f"logprob_token_ids {why}.",
        next_step="Remove logprob_token_ids."
        if body.use_beam_search
        else "Set logprobs, and max_tokens to at least 1, or remove logprob_token_ids.",
        param="logprob_token_ids",
        code="invalid_value",
    )


def not_streamed(param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{param} cannot be combined with stream: log-probabilities of the prompt are not streamed.",
        next_step=f"Remove stream or {param}.",
        param=param,
    )


def chosen_at_the_end(param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{param} cannot be combined with stream: the answer is chosen when all of it is generated.",
        next_step=f"Remove stream or {param}.",
        param=param,
    )


UNSET = msgspec.UNSET


_KINDS = ("json", "regex", "choice", "grammar", "json_object")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_guided = attrgetter(*_GUIDED)
_NOT_GUIDED = (None,) * len(_GUIDED)
_NAME = "structured_outputs"


def structured_of(body: SamplingBody, form: Any = None) -> tuple[dict[str, Any], dict[str, str]]:
    """The engine parameter `structured_outputs`, if one is asked for, and the field that asks for it,
    by the parameter's name. `form`: the response_format."""
    asked = _asked(body)
    if not asked:
        return {}, {}
    if len(asked) > 1 or form not in (None, {"type": "text"}):
        named = [*asked, *(["response_format"] if form is not None else [])]
        raise BadRequest(
            f"The output can have one form only; {' and '.join(named)} are set.",
            next_step="Remove all but one.",
            param=next(iter(asked)),
            code="invalid_value",
        )
    ((name, (kind, value)),) = asked.items()
    _check(name, kind, value)
    return {_NAME: {kind: value}}, {_NAME: name}


def _asked(body: SamplingBody) -> dict[str, tuple[str, Any]]:
    """The kind and the value by the name of the field."""
    asked: dict[str, tuple[str, Any]] = {}
    if _guided(body) != _NOT_GUIDED:
        for name in _GUIDED:
            if (value := getattr(body, name)) is not None:
                asked[name] = name.removeprefix("guided_"), value
    given = body.structured_outputs
    if given is None:
        return asked
    if not isinstance(given, dict):
        raise _invalid("structured_outputs", f"an object with one of {', '.join(_KINDS)}")
    for kind, value in given.items():
        if value is None or value is False:
            continue
        if kind not in _KINDS:
            raise UnsupportedParameter(
                f"structured_outputs.{kind} is not supported.",
                next_step=f"Use one of {', '.join(_KINDS)}.",
                param=f"structured_outputs.{kind}",
            )
        asked[f"structured_outputs.{kind}"] = kind, value
    return asked


def _check(name: str, kind: str, value: Any) -> None:
    if kind == "json" and not isinstance(value, dict | str):
        raise _invalid(name, "a JSON schema, as an object or a string")
    if kind in ("regex", "grammar") and not (isinstance(value, str) and value):
        raise _invalid(name, "a string that is not empty")
    if kind == "choice" and not (isinstance(value, list) and value):
        raise _invalid(name, "a list of strings")
    if kind == "json_object" and value is not True:
        raise _invalid(name, "true")


def _invalid(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
