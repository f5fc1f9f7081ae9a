"""An alert as data. `rules.py` writes it for Prometheus, `runbooks.py` for people, and the page
Alerts shows both."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["critical", "warning", "info"]
Unit = Literal["", "seconds", "share"]


@dataclass(frozen=True, slots=True)
class Runbook:
    """Commands, metrics and settings stand between backticks; `[Engines](/operator/engines)` is a page
    of the dashboard, and `[QueueDeep](#QueueDeep)` another alert."""

    means: str
    see: tuple[str, ...]  # how to see it, and how far it reaches
    do: tuple[str, ...]  # steps, in their order
    over: str  # how to know that it is over


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    measure: str  # PromQL
    compare: str  # ">", "<", "==" or "!="; "" if the measure is a condition by itself
    limit: float
    hold: str  # how long the condition holds before the alert is raised; "": at once
    severity: Severity
    summary: str
    action: str
    runbook: Runbook
    unit: Unit = ""  # of measure and limit

    @property
    def condition(self) -> str:
        """The whole PromQL expression."""
        return f"{self.measure} {self.compare} {self.limit:g}" if self.compare else self.measure

    def holds(self, value: float) -> bool:
        """Whether the condition holds for this value of the measure."""
        return {
            ">": value > self.limit,
            "<": value < self.limit,
            "==": value == self.limit,
            "!=": value != self.limit,
        }[self.compare]
