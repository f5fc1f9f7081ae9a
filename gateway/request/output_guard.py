"""What moderates the output of one choice while it is generated."""

from collections.abc import Sequence
from typing import Protocol


class OutputGuard(Protocol):
    """Moderates the output of one choice. Text that it holds is not sent before the verdict."""

    blocked: bool
    action: str | None  # the strongest action taken, set when the choice has ended
    needs_second_opinion: bool  # it may hold a whole choice for a second opinion
    undecided: bool  # after `flush`: `decide` must be awaited

    @property
    def held(self) -> int:
        """Number of characters held without a verdict."""

    @property
    def needed(self) -> int:
        """Number of characters to feed before any more can be released or blocked, at least 1."""

    @property
    def spare(self) -> int:
        """Number of characters that can be fed before a verdict that may block."""

    @property
    def cut_paid_by(self) -> str:
        """Who pays for the delivered part of a blocked choice: `tenant` or `operator`."""

    @property
    def cuts(self) -> Sequence[tuple[int, int]]:
        """Removed text up to the last release: start and end offsets in the text fed, in order."""

    def clean(self, text: str, *, record: bool = False) -> str | None:
        """A text on its own after the rules, such as a tool call's argument; None when blocked.
        `record` adds what was found to the verdict."""

    def feed(self, text: str, *, last: bool = False) -> str:
        """Returns the text to release. `last`: `flush` follows at once."""

    def flush(self) -> str: ...

    async def decide(self) -> str:
        """Awaits the second opinion and returns the text to release; empty when blocked."""

    def over(self) -> None:
        """Called when the request has ended, for each guard and possibly more than once."""
