"""Applies a new policy's thresholds and entity actions to recorded scores.

No text is stored, so new terms and patterns cannot be tried; recorded hits still count.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from moderation.categories import ENTITY_KINDS
from moderation.models import Decision
from moderation.policy import Policy, Screen
from moderation.verdict import Action


@dataclass(frozen=True, slots=True)
class DryRun:
    """Counts of (recorded, new) actions, and ids of some requests whose action would change."""

    policy_version: str
    decided: int
    changes: dict[tuple[str, str], int]
    examples: tuple[str, ...]

    @property
    def changed(self) -> int:
        return sum(n for (was, would), n in self.changes.items() if was != would)


def dry_run(policy: Policy, decisions: Iterable[Decision], examples: int = 20) -> DryRun:
    """Decide recorded requests again under `policy`, ignoring its `shadow`."""
    counts: Counter[tuple[str, str]] = Counter()
    changed: list[str] = []
    decided = 0
    for decision in decisions:
        decided += 1
        would = decide_again(policy, decision).word
        counts[decision.action, would] += 1
        if would != decision.action and len(changed) < examples:
            changed.append(decision.request_id)
    return DryRun(policy.version, decided, dict(counts), tuple(changed))


def decide_again(policy: Policy, decision: Decision) -> Action:
    """Return the action that a policy takes on a decision's recorded scores and spans."""
    screen = policy.input if decision.direction == "input" else policy.output
    actions = [
        thresholds.action(decision.scores.get(name, 0.0))
        for name, thresholds in screen.categories.items()
    ]
    actions += [_span_action(screen, label, decision) for _, _, label in decision.spans]
    return max(actions, default=Action.ALLOW)


def _span_action(screen: Screen, label: str, decision: Decision) -> Action:
    if label in ENTITY_KINDS:
        return screen.entities.get(label, Action.ALLOW)
    if label == "redacted":  # redacted by score, which the caller decides again
        return Action.ALLOW
    listed = [term.action for term in screen.deny if term.category == label]
    listed += [each.action for each in screen.patterns if label == "pattern"]
    return max(listed, default=Action.ALLOW)
