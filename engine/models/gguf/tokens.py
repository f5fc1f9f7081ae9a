"""The vocabulary of a GGUF file: texts, kinds, and the tokens with a role."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.models.gguf.fields import Fields

_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end an answer though no key names them; llama.cpp goes by the same texts.
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)


@dataclass(frozen=True, slots=True)
class Tokens:
    texts: list[str]
    ids: dict[str, int]
    control: list[int]  # never part of a text, such as <|im_end|>
    user: list[int]  # taken out of a text before it is split
    roles: dict[str, int]  # bos_token, eos_token, unk_token, pad_token
    ends: tuple[int, ...]  # all that end an answer


def read_tokens(fields: Fields, vocabulary: int) -> Tokens:
    """`vocabulary` is the model's. Raises CheckpointError where the two are not of one size."""
    texts = fields.texts("tokenizer.ggml.tokens")
    if len(texts) != vocabulary:
        raise fields.fail(
            f"tokenizer.ggml.tokens has {len(texts)} tokens, but the model {vocabulary}: "
            "they belong to different models"
        )
    ids = {text: number for number, text in enumerate(texts)}
    if len(ids) != len(texts):
        twice = next(text for number, text in enumerate(texts) if ids[text] != number)
        raise fields.fail(f"tokenizer.ggml.tokens holds {twice!r} twice")
    kinds = _kinds(fields, len(texts))
    control = np.flatnonzero(kinds == _CONTROL).tolist()
    return Tokens(
        texts=texts,
        ids=ids,
        control=control,
        user=np.flatnonzero(kinds == _USER).tolist(),
        roles=_roles(fields, len(texts)),
        ends=_ends(fields, ids, set(control)),
    )


def _kinds(fields: Fields, count: int) -> "np.ndarray[Any, Any]":
    kinds = fields.values.get("tokenizer.ggml.token_type")
    if kinds is None:
        return np.full(count, _NORMAL, np.int32)
    if not isinstance(kinds, np.ndarray) or len(kinds) != count:
        raise fields.fail(f"tokenizer.ggml.token_type is not an array of {count} numbers")
    return kinds


def _role(fields: Fields, key: str, count: int) -> int | None:
    key = f"tokenizer.ggml.{key}"
    if key not in fields.values:
        return None
    number = fields.whole(key)
    if not 0 <= number < count:
        raise fields.fail(f"{key} is {number}: the vocabulary has {count} tokens")
    return number


def _roles(fields: Fields, count: int) -> dict[str, int]:
    found = {role: _role(fields, key, count) for role, key in _ROLES.items()}
    return {role: number for role, number in found.items() if number is not None}


def _ends(fields: Fields, ids: dict[str, int], control: set[int]) -> tuple[int, ...]:
    declared = [_role(fields, key, len(ids)) for key in _ENDS]
    known = [ids.get(text) for text in _END_TEXTS]
    return tuple(
        dict.fromkeys(
            [number for number in declared if number is not None]
            + [number for number in known if number is not None and number in control]
        )
    )
