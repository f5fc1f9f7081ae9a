"""A check of one part of the deployment: its state, a finding, and what to do about it."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from core.clock import Clock
from core.errors import TollhouseError
from core.settings import Settings


class Health(StrEnum):
    GOOD = "good"
    WARN = "warn"  # it works, but needs attention
    BAD = "bad"
    UNUSED = "unused"  # not configured, and not needed


@dataclass(frozen=True, slots=True)
class Finding:
    health: Health
    says: str
    next_step: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    part: str
    finding: Finding

    def as_json(self) -> dict[str, Any]:
        return {"part": self.part, **asdict(self.finding)}


Check = Callable[[Settings, Clock], Finding]


def good(says: str) -> Finding:
    return Finding(Health.GOOD, says)


def warn(says: str, next_step: str) -> Finding:
    return Finding(Health.WARN, says, next_step)


def bad(says: str, next_step: str) -> Finding:
    return Finding(Health.BAD, says, next_step)


def unused(says: str) -> Finding:
    return Finding(Health.UNUSED, says)


def run_checks(checks: dict[str, Check], settings: Settings, clock: Clock) -> Iterator[Report]:
    """Run the checks in order, with one report each. A check that raises is reported as bad."""
    for part, check in checks.items():
        try:
            finding = check(settings, clock)
        except TollhouseError as error:
            finding = bad(error.message, error.next_step)
        except Exception as error:
            finding = bad(f"{type(error).__name__}: {error}", "Run again with TOLLHOUSE_DEBUG=1.")
        yield Report(part, finding)
