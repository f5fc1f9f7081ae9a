"""The canonical split of a request's usage, in which every port reports what its provider counted.

Each number is of its own: `input` has no cached tokens, and no token is in two of the input's parts.
Reasoning is a part of the output, and so are the tokens of other modalities a part of their side:
`Components.within` makes them parts of what no cache held and of what was billed.
"""

from typing import Any

from msgspec import Struct

LARGEST = 2**31 - 1  # the columns of usage events are 32-bit integers


class Split(Struct, frozen=True):
    """Tokens, unless said otherwise."""

    input: int = 0  # that no cache held
    cache_read: int = 0
    cache_write: int = 0  # kept for the provider's usual time, five minutes at most of them
    cache_write_long: int = 0  # kept for an hour
    output: int = 0  # with reasoning
    reasoning: int = 0
    audio_input: int = 0
    image_input: int = 0
    audio_output: int = 0
    image_output: int = 0
    searches: int = 0  # of the web, by the provider's own tool
    tool_calls: int = 0  # of the provider's other tools

    @property
    def prompt(self) -> int:
        """All input."""
        return self.input + self.cache_read + self.cache_write + self.cache_write_long

    def as_openai(self) -> dict[str, Any]:
        """In the form of OpenAI's `usage`, which includes cached tokens in the prompt's."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "prompt_tokens_details": {
                "cached_tokens": self.cache_read,
                "cache_write_tokens": self.cache_write,
                "cache_write_long_tokens": self.cache_write_long,
                "audio_tokens": self.audio_input,
                "image_tokens": self.image_input,
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "audio_tokens": self.audio_output,
                "image_tokens": self.image_output,
            },
            "searches": self.searches,
            "tool_calls": self.tool_calls,
        }


def split_of(total_input: int, *, read: int = 0, written: int = 0, **others: int) -> Split:
    """The split of a provider whose count of the input includes what was cached. Of parts that sum to
    more than the whole, the later ones are cut."""
    read = min(read, total_input)
    written = min(written, total_input - read)
    uncached = total_input - read - written
    return Split(input=uncached, cache_read=read, cache_write=written, **others)


def count(holder: Any, *names: str) -> int:
    """The first of these fields that is a plausible count, else 0: a number that is negative, too
    large or not whole is as one that is missing."""
    if isinstance(holder, dict):
        for name in names:
            value = holder.get(name)
            if type(value) is int and 0 <= value <= LARGEST:
                return value
    return 0
