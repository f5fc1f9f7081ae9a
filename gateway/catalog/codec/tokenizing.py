"""Text to token ids and back, for one model.

Decoding is incremental: text is emitted only as complete UTF-8, and a token's text is the difference
between two decodings of a short window, which is correct for every decoder, including those that
strip or join spaces.
"""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gateway.catalog.checkpoint import Checkpoint, read_checkpoint
from gateway.catalog.codec.control_tokens import ControlTokens
from gateway.catalog.codec.encoding import TextEncoder
from gateway.catalog.codec.prefix_tokens import PrefixTokenCache
from gateway.catalog.codec.templates import ChatTemplate
from gateway.catalog.codec.word_cache import WordCache

INLINE_CHARACTERS = 2_000  # longer texts are encoded in a thread; about a millisecond
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
        self.encoder = TextEncoder(tokenizer)
        self.control = ControlTokens(tokenizer)
        self._word_cache = words = WordCache(tokenizer)
        self.prefix_tokens = PrefixTokenCache(tokenizer, encoder=self.encoder, words=words)
        self.template = template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self._shown: dict[frozenset[str], dict[int, str]] = {}
        self._token_bytes = TokenBytes(tokenizer)
        self._token_text = lru_cache(maxsize=65536)(self._text_of_token)

    def encode(self, text: str, *, special: bool = False, at_most: int | None = None) -> list[int]:
        """`special` adds the model's special tokens for a raw prompt (its BOS). Raises TooManyTokens
        for a longer text that has more than `at_most`. Texts of more than a few thousand characters
        belong in a thread."""
        ids = None if special else self._word_cache.encode(text)
        if ids is not None:
            return ids
        return self.encoder.encode(text, special=special, at_most=at_most)

    def encode_truncated(self, text: str, at_most: int) -> list[int]:
        """The first tokens of a text, with the model's special tokens around them."""
        return self.encoder.encode_truncated(text, at_most)

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """`special` shows special tokens. Batch calls release the interpreter's lock."""
        (text,) = self.tokenizer.decode_batch([ids], skip_special_tokens=not special)
        return str(text)

    def token_text(self, token: int) -> str:
        """The text of a single token for logprobs; special tokens by name."""
        return self._token_text(token)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a single token. Those of the tokens of a text, joined, are the text's."""
        return self._token_bytes.of(token, self._token_text(token))

    def detokenizer(self, shown: Mapping[int, str] | None = None) -> "Detokenizer":
        """`shown`: control tokens, by id, that are not dropped."""
        return Detokenizer(self.tokenizer, shown)

    def control_tokens(self, texts: frozenset[str]) -> dict[int, str]:
        """Those of these texts that are control tokens of the model, by id."""
        found = self._shown.get(texts)
        if found is None:
            added = self.tokenizer.get_added_tokens_decoder()
            found = {i: t.content for i, t in added.items() if t.special and t.content in texts}
            self._shown[texts] = found
        return found

    def _text_of_token(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


class Detokenizer:
    """Feed ids one at a time; each call returns the text that the id completes."""

    def __init__(self, tokenizer: Tokenizer, shown: Mapping[int, str] | None = None) -> None:
        self._decode = tokenizer.decode
        self._shown = shown or {}
        self._window: list[int] = []  # emitted tokens for context, then pending ones
        self._emitted = 0  # number of emitted tokens in the window
        self._prefix = ""  # text of the emitted part

    @property
    def pending(self) -> bool:
        return len(self._window) > self._emitted

    def feed(self, token: int) -> str:
        if token in self._shown:
            text = self.flush() + self._shown[token]
            self._window, self._emitted, self._prefix = [], 0, ""
            return text
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


def load_codec(path: Path) -> TextCodec:
    """Of a directory in Hugging Face layout (tokenizer.json is enough), or of a `.gguf` file."""
    return codec_of(read_checkpoint(path))


def codec_of(files: Checkpoint) -> TextCodec:
    """SettingError where the chat template does not parse."""
    template = None
    if files.templates:
        template = ChatTemplate(files.templates, files.special_tokens)
    return TextCodec(files.tokenizer, template, files.eos_ids)


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space


def _byte_of_character() -> dict[str, int]:
    """The byte behind each character of a byte-level vocabulary (Radford et al., 2019): printable
    Latin-1 stands for itself, all others for the code points from 256 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + n): byte for n, byte in enumerate(hidden)
    }


_BYTES = _byte_of_character()


class TokenBytes:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        parts = _parts(json.loads(decoder.__getstate__())) if decoder is not None else set()
        self._is_byte_level = "ByteLevel" in parts
        self._added = tokenizer.get_added_tokens_decoder()

    def of(self, token: int, text: str) -> bytes:
        """`text`: what the token decodes to alone."""
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._added:
            return text.encode()
        if self._is_byte_level and all(character in _BYTES for character in piece):
            return bytes([_BYTES[character] for character in piece])
        if found := _BYTE.fullmatch(piece):
            return bytes([int(found[1], 16)])
        return str(piece).replace(_SPACE, " ").encode()


def _parts(decoder: Any) -> set[str]:
    """The types of a decoder and of those within it."""
    inner = [_parts(each) for each in decoder.get("decoders", ())]
    return {str(decoder.get("type"))}.union(*inner)
