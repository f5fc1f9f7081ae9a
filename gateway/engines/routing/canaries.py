"""Canaries: replicas that get a declared share of their model's conversations."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.engines.routing.replicas import Replica


def in_turn(
    ready: list[Replica], every: Sequence[Replica], shares: Mapping[str, int], point: float
) -> list[Replica]:
    """The ready replicas among which a conversation is placed: its canary, or those without a share.
    If they are not ready, all. `every` are the model's replicas in the order of the setting."""
    below = 0
    for replica in every:
        below += shares.get(replica.name, 0)
        if point < below:
            return [replica] if replica in ready else ready
    return [replica for replica in ready if replica.name not in shares] or ready


def point_of(namespace: str, messages: Sequence[Mapping[str, Any]] | None, ids: list[Any]) -> float:
    """From 0 to 100; the same for every turn of a conversation, in every process."""
    opening = [namespace, str(ids[:64])]
    if messages:
        turns = [str(each.get("content")) for each in messages if each.get("role") == "user"]
        opening = [namespace, *turns[:1]]
    text = "\0".join(opening).encode("utf-8", "replace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64 * 100
