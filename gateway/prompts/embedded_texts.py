"""The token ids of texts that are embedded or compared. Each has the whole context to itself."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from core.errors import BadRequest, ContextLengthExceeded
from gateway.catalog.catalog import OPEN_CONTEXT
from gateway.catalog.codec.encoding import TooManyTokens
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.prompts.truncation import estimate, most_tokens
from gateway.request.inference import InferenceRequest

_SURELY_TOO_LONG = 4  # times the context, by the likely count
# Bytes of one text for a server that reports no context. Models that embed read 32,768 tokens at most,
# some 131,072 bytes; a much longer text is refused unread, because to screen it takes seconds.
_MOST_BYTES = 262_144


class EmbeddedTexts(Struct, frozen=True):
    request: InferenceRequest
    ids: list[list[int]]  # without a tokenizer: of the likely lengths
    most: int = 0  # without a tokenizer: the most tokens that the texts can have


def read_texts(
    request: InferenceRequest, codec: TextCodec | None, context_length: int
) -> EmbeddedTexts:
    """Blocking; for a thread. With a tokenizer, token ids are also decoded, so that they are
    screened as text."""
    inputs: Sequence[str | list[int]] = request.inputs or ()
    if codec is None:
        return _estimated(request, inputs, context_length)
    ids = [_ids(request, index, each, codec, context_length) for index, each in enumerate(inputs)]
    if not all(ids):
        raise BadRequest(
            f"input[{ids.index([])}] has no tokens.", next_step="Remove it.", param="input"
        )
    decoded = tuple(codec.decode(each) for each in inputs if not isinstance(each, str))
    return EmbeddedTexts(replace(request, decoded_prompts=decoded), ids)


def _estimated(
    request: InferenceRequest, inputs: Sequence[str | list[int]], context_length: int
) -> EmbeddedTexts:
    """The upstream enforces its own limit: only what is far above it is refused here, before it is
    screened."""
    ids: list[list[int]] = []
    most = 0
    for each in inputs:
        if not isinstance(each, str):
            raise BadRequest(
                "input has token ids, but this model's tokenizer is not known here, so they cannot be "
                "counted or screened.",
                next_step="Send text. An operator can name the model's tokenizer in "
                "TOLLHOUSE_UPSTREAMS.",
                param="input",
            )
        unknown = context_length >= OPEN_CONTEXT and request.truncate_prompt_tokens is None
        if unknown and len(each.encode("utf-8", "surrogatepass")) > _MOST_BYTES:
            raise _too_many_bytes(len(ids))
        size = estimate((each,))
        if size > _SURELY_TOO_LONG * context_length and request.truncate_prompt_tokens is None:
            raise _too_long(len(ids), size, context_length)
        ids.append([0] * size)
        most += max(size, min(most_tokens((each,)), context_length))
    return EmbeddedTexts(request, ids, most)


def _ids(
    request: InferenceRequest,
    index: int,
    given: str | list[int],
    codec: TextCodec,
    context_length: int,
) -> list[int]:
    cut = request.truncate_prompt_tokens
    most = context_length if cut in (None, -1) else min(cut or 1, context_length)
    if cut is not None:
        return codec.encode_truncated(given, most) if isinstance(given, str) else given[:most]
    if not isinstance(given, str):
        _check(index, given, codec, len(given), most)
        return given
    try:
        return codec.encode(given, special=True, at_most=most)
    except TooManyTokens as error:
        raise _too_long(index, error.tokens, most) from None


def _check(index: int, given: list[int], codec: TextCodec, size: int, most: int) -> None:
    if size > most:
        raise _too_long(index, size, most)
    if max(given) >= codec.vocab_size:
        raise BadRequest(
            f"input[{index}] contains the token id {max(given)}; this model has ids 0 to "
            f"{codec.vocab_size - 1}.",
            next_step="Use ids of this model's tokenizer; /tokenize returns them.",
            param="input",
        )


def _too_many_bytes(index: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"input[{index}] has more than {_MOST_BYTES} bytes, and the context length of this model is not "
        "known here.",
        next_step=f"Split input[{index}] into shorter texts. An operator can set context_length in "
        "TOLLHOUSE_UPSTREAMS.",
        param="input",
    )


def _too_long(index: int, size: int, most: int) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"input[{index}] has {size} tokens; the model takes at most {most}.",
        next_step=f"Split input[{index}] into shorter texts, or set truncate_prompt_tokens to -1.",
        param="input",
    )
