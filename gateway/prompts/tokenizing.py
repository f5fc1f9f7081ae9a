"""Converts text to token ids and back, for a model directory in Hugging Face layout.

Decoding is incremental: text is emitted only as complete UTF-8, and a token's text is the difference
between two decodings of a short window, which is correct for every decoder, including those that
strip or join spaces.
"""

import json
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from core.errors import SettingError
from gateway.prompts.control_tokens import ControlTokens
from gateway.prompts.prefix_tokens import PrefixTokenCache
from gateway.prompts.templates import ChatTemplate
from gateway.prompts.word_cache import WordCache

_REPLACEMENT = "\ufffd"  # what decoders emit for incomplete UTF-8
_MAX_PENDING = 8  # tokens; a code point has at most 4 bytes, so more than this is not UTF-8


class TextCodec:
    """`encode` for prompts, a `detokenizer()` per choice, `template` for chats."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.control = ControlTokens(tokenizer)
        self.prefix_tokens = PrefixTokenCache(tokenizer)
        self._word_cache = WordCache(tokenizer)
        self.template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._token_text = lru_cache(maxsize=65536)(self._text_of_token)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """`special` adds the model's special tokens for a raw prompt (its BOS)."""
        ids = None if special else self._word_cache.encode(text)
        if ids is not None:
            return ids
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def token_text(self, token: int) -> str:
        """The text of a single token for logprobs; special tokens by name."""
        return self._token_text(token)

    def detokenizer(self) -> "Detokenizer":
        return Detokenizer(self.tokenizer)

    def _text_of_token(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


class Detokenizer:
    """Feed ids one at a time; each call returns the text that the id completes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []  # emitted tokens for context, then pending ones
        self._emitted = 0  # number of emitted tokens in the window
        self._prefix = ""  # text of the emitted part

    @property
    def pending(self) -> bool:
        return len(self._window) > self._emitted

    def feed(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        pending_tokens = len(self._window) - self._emitted
        if text.endswith(_REPLACEMENT) and pending_tokens < _MAX_PENDING:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The pending text; incomplete UTF-8 becomes the replacement character."""
        if not self.pending:
            return ""
        return self._emit(self._decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        # Keep only the newest tokens as context: decoders look back one token at most.
        if new:
            self._window = self._window[self._emitted :]
        elif len(self._window) > 4 * _MAX_PENDING:
            self._window = self._window[-_MAX_PENDING:]
        self._emitted = len(self._window)
        self._prefix = self._decode(self._window)
        return new


def load_codec(directory: Path) -> TextCodec:
    """Reads tokenizer.json, tokenizer_config.json and the chat template of a model directory."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise SettingError(
            f"{directory} has no tokenizer.json.",
            next_step="Point TOLLHOUSE_MODEL at a directory in Hugging Face layout.",
        )
    tokenizer = Tokenizer.from_file(str(file))
    config = _read_json(directory / "tokenizer_config.json")
    tokens = {
        name: _token_text(config[name])
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if config.get(name)
    }
    template_file = directory / "chat_template.jinja"
    source = template_file.read_text() if template_file.is_file() else config.get("chat_template")
    template = ChatTemplate(source, tokens) if isinstance(source, str) else None
    return TextCodec(tokenizer, template, _eos_ids(directory, tokenizer, tokens))


def _eos_ids(directory: Path, tokenizer: Tokenizer, tokens: dict[str, str]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    if "eos_token" in tokens:
        eos = tokenizer.token_to_id(tokens["eos_token"])
        ids += [eos] if eos is not None else []
    return tuple(dict.fromkeys(ids))


def _token_text(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _read_json(file: Path) -> dict[str, object]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(
            f"{file} is not JSON: {error}.", next_step="Replace it with a complete copy."
        ) from None
    return content if isinstance(content, dict) else {}
