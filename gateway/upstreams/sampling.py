"""Sampling parameters of a request: its own values over the model's defaults."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from engine.protocol import SamplingParams
from gateway.inference.request import InferenceRequest


def sampling_params(
    request: InferenceRequest, max_tokens: int, defaults: Mapping[str, Any]
) -> SamplingParams:
    """A value in the request overrides the model's default, which overrides the engine's."""
    given = _UNSET_PARAMS if _sampling(request) == _UNSET_VALUES else _given(request)
    return SamplingParams(**{"max_tokens": max_tokens, **defaults, **given})


def _given(request: InferenceRequest) -> dict[str, Any]:
    return {
        name: value
        for name, value in zip(_SAMPLING_NAMES, _sampling(request), strict=True)
        if value is not None and value != {} and value != ()
    }


_SAMPLING_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "seed",
    "n",
    "logprobs",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
)
_sampling = attrgetter(*_SAMPLING_NAMES)
_UNSET_VALUES = _sampling(InferenceRequest("", ""))
_UNSET_PARAMS = _given(InferenceRequest("", ""))
