"""Applies a new policy's thresholds and entity actions to recorded scores.

No text is stored, so new terms, patterns and entities cannot be tried; recorded hits still count. A
trial counts them on live traffic.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

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
    untried: tuple[str, ...] = ()  # rules that recorded decisions cannot show

    @property
    def changed(self) -> int:
        return sum(n for (was, would), n in self.changes.items() if was != would)


def dry_run(
    policy: Policy, decisions: Iterable[Decision], in_force: Policy, examples: int = 20
) -> DryRun:
    """Decide recorded requests again under `policy`, ignoring its `shadow`. What `in_force` does not
    look for was not recorded."""
    counts: Counter[tuple[str, str]] = Counter()
    changed: list[str] = []
    decided = 0
    for decision in decisions:
        decided += 1
        would = decide_again(policy, decision).word
        counts[decision.action, would] += 1
        if would != decision.action and len(changed) < examples:
            changed.append(decision.request_id)
    untried = chain(
        _new_rules("input", policy.input, in_force.input),
        _new_rules("output", policy.output, in_force.output),
    )
    return DryRun(policy.version, decided, dict(counts), tuple(changed), tuple(untried))


def _new_rules(direction: str, screen: Screen, known: Screen) -> Iterable[str]:
    """The names of the rules of a screen that another one lacks."""
    terms, patterns = {term.text for term in known.deny}, {each.source for each in known.patterns}
    for term in screen.deny:
        if term.text not in terms:
            yield f"{direction}: phrase {term.text!r}"
    for text in screen.allow:
        if text not in known.allow:
            yield f"{direction}: allowed phrase {text!r}"
    for pattern in screen.patterns:
        if pattern.source not in patterns:
            yield f"{direction}: pattern {pattern.name!r}"
    for kind, action in screen.entities.items():
        if action > Action.ALLOW and known.entities.get(kind, Action.ALLOW) is Action.ALLOW:
            yield f"{direction}: entity {kind}"


def trial_of(policy: Policy, in_force: Policy) -> Policy:
    """The policy whose new terms, patterns and entities annotate only, so that live traffic counts
    what they find. All that `in_force` looks for keeps its action."""
    return replace(
        policy,
        input=_annotating(policy.input, in_force.input),
        output=_annotating(policy.output, in_force.output),
    )


def _annotating(screen: Screen, known: Screen) -> Screen:
    terms, patterns = {term.text for term in known.deny}, {each.source for each in known.patterns}
    return replace(
        screen,
        deny=tuple(
            term if term.text in terms else replace(term, action=Action.ANNOTATE)
            for term in screen.deny
        ),
        patterns=tuple(
            each if each.source in patterns else replace(each, action=Action.ANNOTATE)
            for each in screen.patterns
        ),
        entities={
            kind: min(action, Action.ANNOTATE)
            if known.entities.get(kind, Action.ALLOW) is Action.ALLOW
            else action
            for kind, action in screen.entities.items()
        },
    )


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
