"""Divides the measured time of a step among its requests, by the work of their rows.

The work of a row is counted in bytes that the device moves: its tokens' share of the weights, which a
step reads once; the keys and values that it reads; and its floating-point operations, through the
weights and in attention, as the bytes that the device could have moved meanwhile. A token far into a
long context therefore takes more of a step than one at the start of a short one.
"""

from dataclasses import dataclass

from engine.batch import Row
from engine.model_spec import ModelSpec
from engine.scheduling.sequence import Sequence

# Between those of a CPU core (about 10) and of a data centre's GPU (about 300 in 16 bits).
FLOPS_PER_BYTE = 100


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a model's step reads and computes. Sizes in bytes, operations in floating-point operations."""

    weight_bytes: float  # read once a step
    token_flops: float  # of a token, without attention
    position_bytes: float  # of the keys and values of a position
    position_flops: float  # of the attention of a token to one position
    window: int = 0  # positions that the layers with a sliding window see; 0: there are none
    full_share: float = 1.0  # of the layers that see all positions

    def visible(self, length: float) -> float:
        """Positions that a token after `length` positions sees, as an average over the layers."""
        if not self.window:
            return length
        return self.full_share * length + (1 - self.full_share) * min(length, self.window)

    def of_row(self, row: Row, step_tokens: int) -> float:
        """The work of a row in a step of so many tokens."""
        count = len(row.tokens)
        flops = self.token_flops + self.position_flops * self.visible(row.start + (count + 1) / 2)
        read = self.position_bytes * self.visible(row.start + count)
        return count * (flops / FLOPS_PER_BYTE + self.weight_bytes / step_tokens) + read


def model_work(spec: ModelSpec, weight_bytes: int, position_bytes: float) -> ModelWork:
    attention = spec.hidden * (2 * spec.q_width + 2 * spec.kv_width)
    mlps = 0
    for layer in range(spec.layers):
        experts = spec.experts_of(layer)
        inner = (
            spec.intermediate
            if experts is None
            else experts.active * experts.intermediate + experts.shared
        )
        mlps += 3 * spec.hidden * inner
    seen = [spec.attention(layer).sight.most for layer in range(spec.layers)]
    windows = [most for most in seen if most]
    return ModelWork(
        weight_bytes=weight_bytes,
        token_flops=2 * (spec.layers * attention + mlps),
        position_bytes=position_bytes,
        position_flops=4 * spec.layers * spec.q_width,
        window=max(windows, default=0),
        full_share=1 - len(windows) / spec.layers,
    )


def share_time(rows: list[tuple[Sequence, Row]], elapsed_s: float, work: ModelWork) -> None:
    """Add to each row's request its share of the step's seconds. The shares add up to them."""
    tokens = sum(len(row.tokens) for _, row in rows)
    parts = [work.of_row(row, tokens) for _, row in rows]
    per_work = elapsed_s / sum(parts)
    for (seq, _), part in zip(rows, parts, strict=True):
        seq.request.busy_s += part * per_work
