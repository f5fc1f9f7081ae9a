"""Checks the parameters of best_of and beam search."""

from engine.errors import RequestError
from engine.protocol import SamplingParams

MOST_CANDIDATES = 20  # OpenAI's limit of best_of
MOST_BEAMS = 16
# What samples, or reads what was generated before: a beam search has neither draws nor one history.
_NOT_WITH_BEAMS = (
    "top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "dry_multiplier", "lz_penalty", "bad_words", "grammar", "prompt_logprobs",
    "best_of", "logprob_token_ids",
)  # fmt: skip


def check_candidates(params: SamplingParams, max_running: int) -> None:
    """Raises RequestError naming the parameter and the limit."""
    most = min(max_running, MOST_CANDIDATES)
    if params.best_of and not params.n <= params.best_of <= most:
        raise RequestError(
            "invalid_request", f"best_of is {params.best_of}: it must be from n to {most}"
        )
    if not params.use_beam_search:
        return
    if params.n > MOST_BEAMS:
        raise RequestError(
            "invalid_request", f"n is {params.n}: beam search has at most {MOST_BEAMS} beams"
        )
    if not -10 <= params.length_penalty <= 10:
        raise RequestError(
            "invalid_request",
            f"length_penalty is {params.length_penalty}: it must be from -10 to 10",
        )
    plain = SamplingParams(params.max_tokens)
    for name in _NOT_WITH_BEAMS:
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(
                "unsupported_parameter",
                f"{name} cannot be combined with use_beam_search: leave it out",
            )
