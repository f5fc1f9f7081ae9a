"""The components of a stored usage event: one short text of JSON, null where nothing is divided."""

from functools import lru_cache

import msgspec

from core.events import Components

_encode = msgspec.json.Encoder(order="deterministic").encode
_decode = msgspec.json.Decoder(Components).decode


def encode_components(parts: Components | None) -> str | None:
    """The same text for the same counts; None where all are zero."""
    if parts is None or parts == _NOTHING:
        return None
    return _encode(parts).decode()


@lru_cache(maxsize=4096)
def decode_components(text: str) -> Components:
    return _decode(text)


_NOTHING = Components()
