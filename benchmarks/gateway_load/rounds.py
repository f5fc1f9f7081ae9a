"""Contenders loaded in turn, round after round: what a shared machine does to one it does to all.

A ratio is taken within a round, between neighbours in time, and the round with the median ratio is
the one that is told. Two runs one after the other may differ by half on a machine whose host serves
others; two ratios hardly do.
"""

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gateway_load.load import Rate, Server, check, run_wrk
from benchmarks.gateway_load.mock import STREAM_TEXT, WHOLE_TEXT
from benchmarks.report import median_pair, processor_times, progress, stolen_since

_WARM_S = 4.0


@dataclass(slots=True)
class Contender:
    name: str
    server: Server
    stream: bool = False
    connections: int = 16
    answers: int = 0  # 2xx, ever
    cut_off: int = 0  # that the ends of loads may have cut off
    rates: list[Rate | None] = field(default_factory=list)  # one a round; None: no figure

    def load(self, home: Path, seconds: float) -> Rate | None:
        try:
            rate = run_wrk(
                home, self.server, connections=self.connections, seconds=seconds, stream=self.stream
            )
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            progress(f"  {self.name}: NO FIGURE: {error}")
            return None
        self.answers += rate.answers - rate.failed
        self.cut_off += self.connections
        if rate.answers == 0 or rate.failed:
            progress(f"  {self.name}: {rate}: NO ANSWER, OR SOME FAILED: NO FIGURE")
            return None
        return rate

    def warm(self, home: Path) -> bool:
        """Asked once, its answer compared with the upstream's, and loaded."""
        try:
            check(self.server, STREAM_TEXT if self.stream else WHOLE_TEXT, stream=self.stream)
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            progress(f"  {self.name.upper()} GIVES NO FIGURE: {error}")
            return False
        self.answers += 1
        return self.load(home, _WARM_S) is not None


def rounds(
    home: Path, contenders: Sequence[Contender], *, count: int, seconds: float, connections: int
) -> float:
    """Fill each contender's rates; the percentage of the processor that the host took meanwhile."""
    for each in contenders:
        each.connections, each.rates = connections, []
    able = [each for each in contenders if each.warm(home)]
    before = processor_times()
    for number in range(count):
        for each in able if number % 2 else reversed(able):
            each.rates.append(each.load(home, seconds))
        shown = ", ".join(f"{each.name} {_words(each.rates[-1])}" for each in able)
        progress(f"  {connections} connections: {shown}")
    return stolen_since(before)


def beside(
    own: Contender, peer: Contender | None, of: Callable[[Rate], float]
) -> tuple[float, float | None] | None:
    """Ours and theirs `of` the round with the median ratio; without a peer's rates our median
    alone, and None without ours."""
    theirs = peer.rates if peer is not None else []
    return median_pair(
        [None if rate is None else of(rate) for rate in own.rates],
        [None if rate is None else of(rate) for rate in theirs],
    )


def _words(rate: Rate | None) -> str:
    return f"{rate.per_s:.0f}/s, p50 {rate.p50_ms:.2f} ms" if rate is not None else "no figure"
