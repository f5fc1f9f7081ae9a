"""Thinking blocks of earlier answers, whose signatures only their provider verifies."""

from collections.abc import Sequence
from typing import Any, Protocol

from gateway.request.thoughts import ANTHROPIC, FIELD, encrypted, thought, unpack

OWN_SIGNATURE = "dG9sbGhvdXNl"  # of thoughts that no provider signed; opaque, as Anthropic's are


class Block(Protocol):
    """A block of a message, as far as it may be a thought."""

    type: str
    thinking: str | None
    signature: str | None
    data: str | None


def details_of(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """The signed thoughts, each with its place among the message's other blocks."""
    details: list[dict[str, Any]] = []
    place = 0
    for block in blocks:
        if block.type == "thinking" and block.signature not in (None, "", OWN_SIGNATURE):
            signature = str(block.signature)
            written = unpack(signature)
            if written is None:
                written = [thought(block.thinking or "", signature, ANTHROPIC)]
            details += [{**each, "index": place} for each in written]
        elif block.type == "redacted_thinking":
            data = block.data or ""
            written = unpack(data)
            if written is None:
                written = [encrypted(data, ANTHROPIC)]
            details += [{**each, "index": place} for each in written]
        elif block.type != "thinking":
            place += 1
    return details


def with_details(message: dict[str, Any], details: list[dict[str, Any]]) -> dict[str, Any]:
    return {**message, FIELD: details} if details else message
