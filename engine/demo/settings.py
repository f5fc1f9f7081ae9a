"""Every number of the demo model's recipe."""

from dataclasses import dataclass

SEED = 20260
VOCAB_SIZE = 2048
CONTEXT = 4096


@dataclass(frozen=True)
class Shape:
    """The Llama architecture's sizes."""

    hidden: int = 256
    layers: int = 5
    intermediate: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; tokens_per_step counts padding."""

    dialogues: int
    learning_rate: float
    tokens_per_step: int = 4096
    warmup_share: float = 0.04
    weight_decay: float = 0.05
    clip: float = 1.0


@dataclass(frozen=True)
class Style:
    """One adapter: its rank, and the schedule on dialogues in its style."""

    name: str
    rank: int
    schedule: Schedule


SHAPE = Shape()
BASE = Schedule(dialogues=5_000, learning_rate=2e-3)
STYLES = (
    Style("formal", 8, Schedule(dialogues=1_200, learning_rate=3e-3)),
    Style("pirate", 16, Schedule(dialogues=1_200, learning_rate=3e-3)),
    Style("json", 4, Schedule(dialogues=1_200, learning_rate=4e-3)),
)
