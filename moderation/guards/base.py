"""The port of a second stage: it asks some questions about a text and reads the answers.

How a question reaches a model is the caller's: a callable takes the prompt and returns text. So
the same guard runs on our own engine or on any upstream, and in tests on a fake.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

Complete = Callable[[str], str]
CompleteLater = Callable[[str], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Opinion:
    """Scores by OpenAI's category names; empty means that the guard finds nothing wrong."""

    scores: Mapping[str, float] = field(default_factory=dict)


class UnreadableAnswer(ValueError):
    """A guard answered something that its template does not allow."""


class Guard(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def by_chat(self) -> bool:
        """True where the question is a user's turn in the model's own chat template."""
        ...

    def questions(self, text: str, role: str) -> Sequence[str]:
        """Return the prompts to complete; `role` is user or assistant."""
        ...

    def read(self, answers: Sequence[str]) -> Opinion:
        """Read the completions, in the order of the questions, or raise UnreadableAnswer."""
        ...


def plain(text: str) -> str:
    """Break the special tokens of any chat template, so that a text cannot end its own turn."""
    for token in ("<start_of_turn>", "<end_of_turn>"):
        text = text.replace(token, "")
    return text.replace("<|", "< |").replace("|>", "| >")
