"""Names of sampling and surface parameters that several steps read."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Parameters beyond OpenAI's: the field of `InferenceRequest`, and its value when it is not set.
EXTRA: Mapping[str, Any] = MappingProxyType(
    {
        "top_k": None,
        "min_p": None,
        "typical_p": None,
        "top_n_sigma": None,
        "dry_multiplier": None,
        "dry_base": None,
        "dry_allowed_length": None,
        "dry_sequence_breakers": None,
        "lz_penalty": None,
        "best_of": None,
        "use_beam_search": False,
        "length_penalty": None,
        "bad_words": (),
        "allowed_token_ids": (),
        "repetition_penalty": None,
        "stop_token_ids": (),
        "min_tokens": 0,
        "ignore_eos": False,
        "include_stop_str_in_output": False,
        "truncate_prompt_tokens": None,
        "truncation_side": "left",
        "logprob_token_ids": (),
        "chat_template_kwargs": {},
        "continue_final_message": False,
        "reasoning_effort": None,
        "prediction": None,
        "service_tier": None,
    }
)


# Of these, hints to the model that an upstream's entry may list in its `extra_fields`.
PASSED = ("verbosity", "prompt_cache_retention", "prompt_cache_options")
