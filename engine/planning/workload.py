"""What is asked of a deployment, and what it promises."""

from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests a second that arrive at random, their tokens on average, and the objectives in seconds
    (0: none). `shared`: tokens of the prompt that all requests begin with, which are computed once."""

    rate: float
    prompt: float
    output: float
    shared: float = 0.0
    ttft: float = 0.0
    tpot: float = 0.0
    acceptance: float = 0.0  # share of guessed tokens that prove right
    guesses: int = 0  # tokens guessed in a step; 0: no speculation

    def __post_init__(self) -> None:
        for name, value, least in (
            ("rate", self.rate, 0.0), ("prompt", self.prompt, 1.0), ("output", self.output, 1.0),
            ("shared-prefix", self.shared, 0.0), ("ttft", self.ttft, 0.0), ("tpot", self.tpot, 0.0),
            ("guesses", self.guesses, 0.0),
        ):  # fmt: skip
            if not least <= value < 1e12 or (name == "rate" and value == 0):
                least_words = "above 0" if name == "rate" else f"{least:g} or more"
                raise ConfigError(f"{name} is {value:g}: it must be {least_words}")
        if self.shared >= self.prompt:
            raise ConfigError(
                f"shared-prefix is {self.shared:g}: it must be shorter than the prompt ({self.prompt:g})"
            )
        if not 0 <= self.acceptance < 1:
            raise ConfigError(f"acceptance is {self.acceptance:g}: it must be from 0 to below 1")

    @property
    def computed(self) -> float:
        """Tokens of a prompt that are not found in the cache."""
        return self.prompt - self.shared

    @property
    def tokens_a_step(self) -> float:
        return tokens_a_step(self.acceptance, self.guesses)


def tokens_a_step(acceptance: float, guesses: int) -> float:
    """Tokens that a step of speculative decoding gives a sequence, if each guess is right with the same
    chance whatever the others: (1 − a^(g+1)) / (1 − a), arXiv 2211.17192, equation 1."""
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
