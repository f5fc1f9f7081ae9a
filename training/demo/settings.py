"""Every number of the demo model's recipe."""

from dataclasses import dataclass

SEED = 20260
VOCAB_SIZE = 2048
CONTEXT = 4096
PROCESSES = 2


@dataclass(frozen=True)
class Shape:
    """The Llama architecture's sizes."""

    hidden: int = 256
    layers: int = 4
    intermediate: int = 640
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True)
class Schedule:
    """Training length and rates. Openings are dialogues that end after OPENING_TOKENS of the
    answer; tokens_per_step includes padding and is per process."""

    dialogues: int
    learning_rate: float
    openings: int = 0
    tokens_per_step: int = 1536
    warmup_share: float = 0.04
    weight_decay: float = 0.05
    clip: float = 1.0


@dataclass(frozen=True)
class Style:
    """One adapter: its rank, and the schedule on dialogues in its style."""

    name: str
    rank: int
    schedule: Schedule


@dataclass(frozen=True)
class HeadsPlan:
    """Draft heads: how many prompts are answered in at most `longest` tokens, how wide the network
    is, which number of ids it may guess (0: all), and its training."""

    prompts: int
    longest: int
    inner: int
    steps: int
    batch: int
    vocabulary: int = 0
    schedule: Schedule = Schedule(dialogues=0, learning_rate=2e-3)


SHAPE = Shape()
BASE = Schedule(dialogues=26_000, learning_rate=2e-3)
POLISH = Schedule(dialogues=8_000, openings=50_000, learning_rate=1.5e-3)
OPENING_TOKENS = 8
STYLES = (
    Style("formal", 8, Schedule(dialogues=2_400, learning_rate=2e-3, tokens_per_step=768)),
    Style("pirate", 16, Schedule(dialogues=2_800, learning_rate=2e-3, tokens_per_step=768)),
    Style("json", 4, Schedule(dialogues=2_400, learning_rate=3e-3, tokens_per_step=768)),
)
HEADS = HeadsPlan(prompts=1_200, longest=160, inner=384, steps=600, batch=512)
OTHER_HEADS = HeadsPlan(prompts=300, longest=96, inner=1024, steps=600, batch=256, vocabulary=8_192)
