"""The second stage: a guard model judges texts in the grey band, within a deadline.

Its scores replace the classifier's for the categories that it judges; hits of rules stay. If the
guard fails, misses the deadline or answers unreadably, the policy's failure mode applies.
"""

import asyncio
import logging
from collections.abc import Sequence

from msgspec.structs import replace

from moderation.categories import PROMPT_ATTACK
from moderation.guards.base import CompleteLater, Guard, Opinion
from moderation.guards.llama_guard import LlamaGuard
from moderation.guards.qwen3_guard import Qwen3Guard
from moderation.guards.remote import RemoteModeration
from moderation.guards.shield_gemma import ShieldGemma
from moderation.policy import ASYNC, OFF, Policy, Screen, Stage
from moderation.verdict import ALLOW, ANNOTATE, BLOCK, Action, Verdict

_log = logging.getLogger(__name__)


def find_guard(name: str) -> Guard:
    """Return the guard with this name. Raises ValueError with the known names."""
    known: dict[str, Guard] = {
        guard.name: guard
        for guard in (LlamaGuard(), ShieldGemma(), Qwen3Guard(), RemoteModeration())
    }
    if name not in known:
        raise ValueError(f"guard is {name!r}: use one of {', '.join(known)}")
    return known[name]


def in_grey_band(verdict: Verdict, policy: Policy) -> bool:
    """Whether the highest harm score is inside the policy's grey band."""
    stage = policy.second_stage
    if stage is None or verdict.action is BLOCK:
        return False
    harms = [score for name, score in verdict.scores.items() if name != PROMPT_ATTACK]
    return stage.low <= max(harms, default=0.0) < stage.high


def reviews_answers(policy: Policy) -> bool:
    """Whether answers are held for the guard; never under a policy that only annotates."""
    stage = policy.second_stage
    notes = policy.shadow or policy.mode in (OFF, ASYNC)
    return stage is not None and stage.answers and not notes


async def consult_guard(
    guard: Guard, complete: CompleteLater, text: str, policy: Policy, verdict: Verdict, role: str
) -> Verdict:
    """Call the guard through an async callable, which is cancelled at the deadline."""
    if policy.second_stage is None:
        return verdict
    try:
        async with asyncio.timeout(policy.second_stage.deadline_ms / 1000):
            questions = guard.questions(text, role)
            answers: Sequence[str] = await asyncio.gather(*(complete(q) for q in questions))
        opinion = guard.read(answers)
    except Exception as error:
        return without_opinion(verdict, policy, guard, error)
    return merged(verdict, opinion, policy, role)


def merged(verdict: Verdict, opinion: Opinion, policy: Policy, role: str) -> Verdict:
    """Decide again with the guard's scores and the rules' existing spans."""
    screen = policy.output if role == "assistant" else policy.input
    scores = {name: opinion.scores.get(name, 0.0) for name in verdict.scores}
    scores[PROMPT_ATTACK] = max(
        verdict.scores.get(PROMPT_ATTACK, 0.0), opinion.scores.get(PROMPT_ATTACK, 0.0)
    )
    would, flagged = _decided(screen, scores)
    would = max([would, *(span.action for span in verdict.spans)])
    flagged |= {span.category for span in verdict.spans}
    return replace(
        verdict,
        action=min(would, ANNOTATE) if policy.shadow else would,
        would=would,
        scores=scores,
        flagged=tuple(sorted(flagged)),
    )


def _decided(screen: Screen, scores: dict[str, float]) -> tuple[Action, set[str]]:
    actions = {
        name: thresholds.action(scores.get(name, 0.0))
        for name, thresholds in screen.categories.items()
    }
    flagged = {name for name, action in actions.items() if action > ALLOW}
    return max(actions.values(), default=ALLOW), flagged


def without_opinion(
    verdict: Verdict, policy: Policy, guard: Guard, error: BaseException
) -> Verdict:
    """The verdict when the guard failed: unscanned if the policy fails open, otherwise block."""
    # Only the type: the message of an error may quote the text.
    _log.error("guard %s failed: %s", guard.name, type(error).__name__)
    if policy.fails_open(Stage.GUARD):
        names = {*verdict.unscanned, Stage.GUARD.value}
        return replace(verdict, unscanned=tuple(sorted(names)))
    return replace(
        verdict,
        action=min(BLOCK, ANNOTATE) if policy.shadow else BLOCK,
        would=BLOCK,
        flagged=tuple(sorted({*verdict.flagged, "guard_failed"})),
    )
