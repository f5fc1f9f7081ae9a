"""What a row costs its tenant in fairness units."""

from engine.batch import Row
from engine.config import EngineConfig
from engine.scheduling.sequence import Sequence


def row_cost(seq: Sequence, row: Row, config: EngineConfig) -> float:
    """Charged when the row is scheduled, as if none of its guesses were right. Tokens recomputed
    after a preemption cost nothing."""
    if row.start >= seq.prompt_len:
        # A guess costs what a prompt token does: the step computes it in the same way.
        return row.sample * config.output_price + row.drafts * config.prompt_price
    end = row.start + len(row.tokens)
    fresh = max(0, min(end, seq.prompt_len) - max(row.start, seq.counted_until))
    return fresh * config.prompt_price + row.sample * config.output_price
