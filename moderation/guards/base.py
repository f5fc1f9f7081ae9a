"""The interface of guards: prompts about a text, and the parsing of the completions.

The caller provides the callable that completes a prompt, so the same guard runs on the product's
own engine, on any upstream, and on a fake in tests.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

CompleteLater = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Opinion:
    """Scores by OpenAI's category names; empty means that the guard found no harm."""

    scores: Mapping[str, float] = field(default_factory=dict)


class InvalidGuardOutput(ValueError):
    """A guard's completion that its template does not allow."""


class Guard(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def uses_chat_template(self) -> bool:
        """Whether the prompt is a user turn in the model's own chat template."""
        ...

    def questions(self, text: str, role: str) -> Sequence[str]:
        """Return the prompts to complete; `role` is user or assistant."""
        ...

    def read(self, answers: Sequence[str]) -> Opinion:
        """Read the completions, in the order of the questions, or raise InvalidGuardOutput."""
        ...


def escape_special_tokens(text: str) -> str:
    """Break the special tokens of all chat templates, so that a text cannot end its turn."""
    for token in ("<start_of_turn>", "<end_of_turn>"):
        text = text.replace(token, "")
    return text.replace("<|", "< |").replace("|>", "| >")
