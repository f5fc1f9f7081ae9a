"""SplitMix64: pseudo-random numbers that are the same on every platform."""

MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The finaliser: every bit of the value reaches every bit of the result."""
    value &= MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)
