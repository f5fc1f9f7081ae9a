"""What a gateway needs of a GGUF file: configuration, tokenizer and chat template. No weights."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.errors import CheckpointError
from engine.models.gguf.config import in_own_words, read_config
from engine.models.gguf.fields import Fields, fields_of
from engine.models.gguf.header import GgufHeader, read_header
from engine.models.gguf.names import hugging_face_names
from engine.models.gguf.tokenizer import build_tokenizer
from engine.models.gguf.tokens import Tokens, read_tokens
from engine.models.registry import model_spec


@dataclass(frozen=True, slots=True)
class GgufModel:
    config: dict[str, Any]  # the content of config.json
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]  # bos_token, eos_token, unk_token, pad_token
    eos_ids: tuple[int, ...]  # all that end an answer, eos_token first
    context_length: int


def describe(path: Path | str) -> GgufModel:
    """Raises CheckpointError, in one line naming the file and the cause."""
    header = read_header(Path(path))
    fields = fields_of(header)
    config, tokens = _read(header, fields)
    hugging_face_names(header, fields)
    template = fields.values.get("tokenizer.chat_template")
    return GgufModel(
        config=config,
        tokenizer=build_tokenizer(fields, tokens),
        chat_template=template if isinstance(template, str) else None,
        special_tokens={role: tokens.texts[number] for role, number in tokens.roles.items()},
        eos_ids=tokens.ends,
        context_length=config["max_position_embeddings"],
    )


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The configuration alone, without the time that a large tokenizer takes to build."""
    return _read(header, fields_of(header))[0]


def _read(header: GgufHeader, fields: Fields) -> tuple[dict[str, Any], Tokens]:
    config = read_config(header, fields)
    try:
        model_spec(config)
    except CheckpointError as error:
        raise fields.fail(in_own_words(error.message, fields)) from None
    tokens = read_tokens(fields, config["vocab_size"])
    return config | {"eos_token_id": list(tokens.ends)}, tokens
