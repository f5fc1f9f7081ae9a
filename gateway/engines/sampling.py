"""Sampling parameters of a request: its own values over the model's defaults."""

from dataclasses import fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from engine.protocol import SamplingParams
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.prompts.grammars import grammar_of
from gateway.request.inference import InferenceRequest

if TYPE_CHECKING:
    from gateway.catalog.catalog import ServedModel
    from gateway.prompts.prompt import Prompt

_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's


def sampling_params(prompt: "Prompt", model: "ServedModel") -> SamplingParams:
    """A value in the request overrides the model's default, which overrides the engine's."""
    request, codec = prompt.request, model.codec
    if request.inputs is not None:
        pooling = request.extra.get("own_engine", {}).get("pooling", "model")
        return SamplingParams(max_tokens=0, pooling=pooling)
    unset = _sampling(request) == _UNSET_VALUES
    if unset and not (request.engine_parameters or request.bad_words or request.dry_multiplier):
        return _default_params(prompt.max_tokens, tuple(model.defaults.items()))
    given = _UNSET_PARAMS if unset else _given(request)
    if request.engine_parameters and (grammar := grammar_of(request)) is not None:
        given = given | {"grammar": grammar}
    if codec is not None and (request.bad_words or request.dry_multiplier):
        given = given | _texts(request, codec)
    return SamplingParams(**{"max_tokens": prompt.max_tokens, **model.defaults, **given})


@lru_cache(maxsize=1_024)
def _default_params(max_tokens: int, defaults: tuple[tuple[str, float], ...]) -> SamplingParams:
    """Of a request that sets nothing: most are, and the parameters are many."""
    return SamplingParams(**{"max_tokens": max_tokens, **dict(defaults), **_UNSET_PARAMS})


def _texts(request: InferenceRequest, codec: TextCodec) -> dict[str, Any]:
    """The parameters that are texts, as token ids. A word is meant with and without a space before
    it."""
    spelled = (
        tuple(codec.encode(text)) for word in request.bad_words for text in (word, f" {word}")
    )
    given: dict[str, Any] = {"bad_words": tuple(dict.fromkeys(ids for ids in spelled if ids))}
    if request.dry_multiplier:
        breakers = request.dry_sequence_breakers
        given["dry_breakers"] = _ids_with(codec, _BREAKERS if breakers is None else breakers)
    return given


@lru_cache(maxsize=64)
def _ids_with(codec: TextCodec, texts: tuple[str, ...]) -> tuple[int, ...]:
    """The tokens whose text contains one of the texts."""
    words = ((n, codec.token_text(n)) for n in range(codec.vocab_size))
    return tuple(n for n, word in words if any(text in word for text in texts))


def _given(request: InferenceRequest) -> dict[str, Any]:
    given = {
        name: value
        for name, value in zip(_SAMPLING_NAMES, _sampling(request), strict=True)
        if value is not None and value != {} and value != ()
    }
    if request.top_p == 0:  # a nucleus has at least the likeliest token, and of 0 no other
        given |= {"top_p": 1.0, "top_k": 1}
    return given


# Both records have these, but for those that a request has as texts, and the limit of the prompt.
_SAMPLING_NAMES = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name in InferenceRequest.__struct_fields__
    and field.name not in ("max_tokens", "bad_words")
)
_sampling = attrgetter(*_SAMPLING_NAMES)
_UNSET_VALUES = _sampling(InferenceRequest("", ""))
_UNSET_PARAMS = _given(InferenceRequest("", ""))
