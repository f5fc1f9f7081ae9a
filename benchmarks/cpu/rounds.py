"""Contenders asked in turn, round after round, each stopped while another runs.

All have loaded and warmed before the first round. A ratio is taken within a round: what a shared
machine does to one it does to its neighbour in time.
"""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from benchmarks.peers.protocol import ANSWERS
from benchmarks.report import processor_times, progress, stolen_since

# What takes longer than this a time is asked for in the first rounds only.
_SLOW_S, _SLOW_ROUNDS = 30.0, 2


@dataclass(slots=True)
class Contender:
    name: str
    process: "subprocess.Popen[str]"
    answers: IO[str]
    scenarios: list[str]
    rates: dict[str, list[float | None]] = field(default_factory=dict)  # one a round

    def ask(self, scenario: str) -> float | None:
        """None where it died of it."""
        assert self.process.stdin is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
        try:
            self.process.stdin.write(scenario + "\n")
            self.process.stdin.flush()
            return float(_next(self.answers))
        except (OSError, RuntimeError) as error:
            progress(f"  {self.name}: NO FIGURE FOR {scenario}: {error}")
            self.scenarios.remove(scenario)
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGSTOP)


@contextlib.contextmanager
def contender(
    name: str, command: Sequence[str], environment: dict[str, str], cwd: Path
) -> Iterator[Contender | None]:
    """Loaded, warmed and stopped; None where it could not."""
    progress(f"{name}: loading")
    heard, said = os.pipe()
    with os.fdopen(heard) as answers:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=2,
            text=True,
            env=environment | {ANSWERS: str(said)},
            pass_fds=(said,),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(said)
        try:
            yield _loaded(name, process, answers)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()


def _loaded(name: str, process: "subprocess.Popen[str]", answers: IO[str]) -> Contender | None:
    try:
        scenarios = json.loads(_next(answers))
    except RuntimeError as error:
        progress(f"  {name.upper()} COULD NOT BE MEASURED: {error}")
        return None
    os.killpg(process.pid, signal.SIGSTOP)
    return Contender(name, process, answers, scenarios)


def rounds(steps: Sequence[tuple[Contender, str]], count: int) -> float:
    """Fill each contender's rates. The percentage of the processor that the host took meanwhile.

    `steps` are those of a round, (who, what); every other round runs backwards.
    """
    before = processor_times()
    slow: set[tuple[int, str]] = set()
    for number in range(count):
        for each, scenario in steps if number % 2 == 0 else reversed(steps):
            asked = scenario in each.scenarios and (each.process.pid, scenario) not in slow
            began = time.monotonic()
            rate = each.ask(scenario) if asked else None
            each.rates.setdefault(scenario, []).append(rate)
            if number + 1 >= _SLOW_ROUNDS and time.monotonic() - began > _SLOW_S:
                slow.add((each.process.pid, scenario))
            if rate is not None:
                progress(f"  round {number}: {each.name}, {scenario}: {rate:.1f} tok/s")
    return stolen_since(before)


def _next(answers: IO[str]) -> str:
    line = answers.readline()
    if not line:
        raise RuntimeError("its process ended; what it said is above")
    return line
