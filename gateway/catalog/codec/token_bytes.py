"""The bytes that one token stands for, which are a part of a character where no text shows them."""

import json
import re
from typing import Any

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"  # how SentencePiece writes a space
_REPLACEMENT = "\ufffd"


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
