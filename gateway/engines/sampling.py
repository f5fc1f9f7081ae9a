"""Sampling parameters of a request: its own values over the model's defaults."""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from engine.protocol import SamplingParams
from gateway.ask import Ask


def sampling_params(ask: Ask, max_tokens: int, defaults: Mapping[str, Any]) -> SamplingParams:
    """A value in the request overrides the model's default, which overrides the engine's."""
    given = _NOTHING_GIVEN if _sampling(ask) == _NOTHING_ASKED else _given(ask)
    return SamplingParams(**{"max_tokens": max_tokens, **defaults, **given})


def _given(ask: Ask) -> dict[str, Any]:
    return {
        name: value
        for name, value in zip(_SAMPLING_NAMES, _sampling(ask), strict=True)
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
_NOTHING_ASKED = _sampling(Ask("", ""))
_NOTHING_GIVEN = _given(Ask("", ""))
