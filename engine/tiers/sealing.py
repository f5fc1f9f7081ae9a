"""What a tier stores of a block: its bytes with a checksum, or encrypted.

Outside this process a block is encrypted by AES-256-GCM with a key of its tenant, and its name is bound
to it: bytes that were changed, cut, moved to another name or stored under another tenant do not open.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

from engine.errors import ConfigError

_CHECKSUM = 4
_KEY = 32

Seal = Callable[[str, str, bytes], bytes]  # owner, name, data
Open = Callable[[str, str, bytes], bytes | None]  # None: the bytes are not those that were sealed


def with_checksum(_owner: str, name: str, data: bytes) -> bytes:
    return zlib.crc32(data, zlib.crc32(name.encode())).to_bytes(_CHECKSUM, "little") + data


def checked(_owner: str, name: str, stored: bytes) -> bytes | None:
    data = stored[_CHECKSUM:]
    found = zlib.crc32(data, zlib.crc32(name.encode())).to_bytes(_CHECKSUM, "little")
    return data if found == stored[:_CHECKSUM] else None


def read_key(path: Path) -> bytes:
    """The operator's key: 32 bytes in hex. Raises ConfigError."""
    hint = f"write one with: openssl rand -hex 32 > {path}"
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(f"tier_key_file {path}: {error.strerror}: {hint}") from None
    except ValueError:
        raise ConfigError(f"tier_key_file {path} is not hex: {hint}") from None
    if len(key) != _KEY:
        raise ConfigError(f"tier_key_file {path} has {len(key)} bytes, not {_KEY}: {hint}")
    return key
