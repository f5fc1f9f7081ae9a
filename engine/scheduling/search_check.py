"""Checks the parameters of best_of and beam search."""

from dataclasses import fields

from engine.errors import RequestError
from engine.protocol import SamplingParams

MOST_CANDIDATES = 20  # OpenAI's limit of best_of
MOST_BEAMS = 16
# All others sample, or read what was generated before: a beam search has neither draws nor one history.
_WITH_BEAMS = (
    "max_tokens", "temperature", "logit_bias", "allowed_token_ids", "seed", "n", "logprobs",
    "stop_token_ids", "min_tokens", "ignore_eos", "pooling", "use_beam_search", "length_penalty",
    "dry_base", "dry_allowed_length", "dry_breakers",
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
    for name in [each.name for each in fields(params) if each.name not in _WITH_BEAMS]:
        if getattr(params, name) != getattr(plain, name):
            raise RequestError(
                "unsupported_parameter",
                f"{name} cannot be combined with use_beam_search: leave it out",
            )
