"""Times under a fixed number of requests at once, each followed by the next: how servers are measured.

    tpot = step(rows, prompt + output/2) + rows/output · chunk(prompt)

since each sequence of a batch is replaced once in `output` steps. Little's law then gives the rate:
rows / (ttft + (output − 1)·tpot).
"""

from dataclasses import dataclass

from engine.planning.memory import memory_of
from engine.planning.step_times import Serving, factors_of


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds, means over requests; `rows` is what runs at once, at most what the memory holds."""

    ttft: float
    tpot: float
    rows: float
    saturated: bool  # more is asked for than the cache holds


def times(
    serving: Serving, concurrency: float, prompt: float, output: float, cached: float = 0.0
) -> Times:
    """`cached`: tokens of the prompt that are found in the prefix cache."""
    room = memory_of(serving, prompt + output, shared=cached).sequences
    rows = max(1.0, min(concurrency, room))
    step = serving.decode_s(rows, prompt + output / 2)
    chunk = serving.prompt_s(prompt - cached, cached)
    tpot = step + rows / output * chunk
    first = first_token(serving, rows, step, prompt - cached, cached)
    if concurrency > rows:  # the rest waits for a place: Little's law
        first += (concurrency - rows) / rows * (first + output * tpot)
    return Times(first, tpot, rows, concurrency > room)


def first_token(serving: Serving, rows: float, step: float, tokens: float, cached: float) -> float:
    """A prompt's own time, those of prompts before it, and the step under way, weighed as fitted."""
    factors = factors_of(serving.kind, serving.server)
    own = sum(serving.prompt_terms(tokens, cached).values())
    return (
        factors["first_own"] * own
        + factors["first_others"] * own * rows
        + factors["first_step"] * step
        + factors["first_fixed"] * 1e-3
    )
