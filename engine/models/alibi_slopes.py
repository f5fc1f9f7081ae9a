"""The slopes of attention with linear biases (arXiv 2108.12409), as the families define them.

Without torch: a gateway that has none reads the same configurations.
"""

import math


def halving_slopes(heads: int) -> tuple[float, ...]:
    """As the paper has them: a geometric series down to 2^-8, and for another number of heads than a
    power of two every other slope of the next one."""
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / whole) for n in range(whole)]
    between = [2 ** (-8 * (n + 1) / (2 * whole)) for n in range(0, 2 * whole, 2)]
    return tuple(slopes + between[: heads - whole])


def mpt_slopes(heads: int, last: float) -> tuple[float, ...]:
    """A geometric series down to 2^-last. For another number of heads than a power of two, those of even
    number of the next one come first, then the others, as many as there are heads."""
    whole: int = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-last * (n + 1) / whole) for n in range(whole)]
    return tuple(slopes if whole == heads else (slopes[1::2] + slopes[::2])[:heads])
