"""What the masks of a step are made of."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING

from engine.batch import Row
from engine.decoding.few import FewIds
from engine.decoding.grammar.beside import Job
from engine.decoding.grammar.compiler import Compiled
from engine.decoding.masks import Masks
from engine.protocol import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher

# How many masks of a sequence are left to the threads: first, after one that took long, and at most.
RESTS = 1, 8, 64


@dataclass(slots=True)
class Work:
    """Masks in the making: of the next tokens of some sequences, and of those after each guess."""

    masks: Masks
    since: float
    future: "Future[None] | Job | None" = None  # None: made

    @property
    def made(self) -> bool:
        return self.future is None or self.future.done()


@dataclass(slots=True)
class MatcherState:
    """The state of a sequence's grammar."""

    matcher: "LLMatcher"
    grammar: Grammar
    compiled: Compiled
    taken: int = 0  # output tokens that the matcher has consumed
    slow: bool = False  # its last mask was late: the next is made apart from the others'
    rest: int = RESTS[0]  # masks that are left to the threads
    rests: int = RESTS[1]
    work: Work | None = None
    guesses: list[int] = field(default_factory=list)  # that `work` follows
    at: int = 0  # the first of its masks in `work`


@dataclass(slots=True)
class MaskGroup:
    """Consecutive rows of one sequence: its next token and those after each guess."""

    state: MatcherState
    row: Row  # the first of them
    at: int  # its place among the step's rows that have a grammar
    guesses: list[int]


@dataclass(slots=True)
class Begun:
    """The masks of a step, in the making."""

    rows: list[Row]
    index: list[int]  # which of the rows have a grammar
    work: Work  # of the masks that are made one after the other; all are put in its memory
    groups: list[MaskGroup] = field(default_factory=list)
    # Free when the groups are known and each has its work: until then they are the other thread's.
    grouped: Lock = field(default_factory=Lock)
    whole: bool = False  # whether `work` has made all masks, without an error
    few: FewIds | None = None  # of a whole one


@dataclass(slots=True)
class StepMasks:
    """What a step may sample."""

    index: list[int] = field(default_factory=list)  # rows that have a mask
    masks: Masks | None = None  # of these rows; None without any
    few: FewIds | None = None  # of those that may sample few ids
    late: set[int] = field(default_factory=set)  # rows to be computed again
    errors: dict[int, str] = field(default_factory=dict)  # by row
