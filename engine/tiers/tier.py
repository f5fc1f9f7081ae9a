"""The port of a tier: a bounded store of bytes by name, which may lose or refuse anything at any time.

A name is `owner/scope/key`: the owner tells tenants apart, the scope models and layouts, and the key is
the block's own in the hash chain. A tier knows nothing else of what it stores.
"""

import hashlib
from typing import Protocol


class Tier(Protocol):
    """Called from several threads. Every method but `holds` and `names` may raise: the caller goes on
    without the tier."""

    label: str  # ram, disk or remote
    listed: bool  # whether `holds` and `names` are known without asking another machine

    def holds(self, name: str) -> bool:
        """Whether a read would probably find it; always False where the tier is not listed."""

    def names(self) -> list[str]: ...

    def read(self, names: list[str]) -> list[bytes]:
        """The data of the leading names that are found; perhaps of fewer, but of one if the first is."""

    def write(self, name: str, data: bytes) -> list[str]:
        """Store it, and return the names that had to go."""

    def erase(self, prefix: str) -> list[str]:
        """Remove every name that begins so, and return those that are known."""

    def discard(self, name: str) -> None:
        """Remove one, whose data proved wrong."""

    def close(self) -> None: ...


class RemoteTier:
    """What tiers on other machines have in common: only a read shows what they hold."""

    label = "remote"
    listed = False

    def holds(self, name: str) -> bool:
        return False

    def names(self) -> list[str]:
        return []


def owner_folder(owner: str) -> str:
    """The beginning of the names of one tenant's blocks."""
    return f"{hashlib.sha256(owner.encode()).hexdigest()[:32]}/"
