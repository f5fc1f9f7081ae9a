"""The figures of one run: reported as they come, kept for the table at the end."""

from typing import Any

from benchmarks.report import figure as report
from benchmarks.report import progress as say

_found: list[dict[str, Any]] = []


def figure(
    benchmark: str, value: float, unit: str, *, higher_is_better: bool = True, **more: Any
) -> None:
    _found.append(report(benchmark, value, unit, higher_is_better, **more))


def say_table() -> None:
    """All figures so far, one a line."""
    say(f"{'figure':36} {'value':>10} {'unit':16} {'peer':>10} {'score':>6}  aim")
    for found in _found:
        peer, score, aim = (
            "" if found[name] is None else f"{found[name]:.4g}"
            for name in ("peer_value", "score", "aim")
        )
        value = f"{found['value']:.4g}"
        say(f"{found['benchmark']:36} {value:>10} {found['unit']:16} {peer:>10} {score:>6}  {aim}")


__all__ = ["figure", "say", "say_table"]
