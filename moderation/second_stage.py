"""The second stage: a guard model is asked about texts in the grey band, within a deadline.

What it says replaces the first screen's scores for the categories it speaks of; rules stand. A
guard that fails, is late or cannot be read follows the policy's failure mode.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

from msgspec.structs import replace

from moderation.categories import PROMPT_ATTACK
from moderation.guards.base import Complete, CompleteLater, Guard, Opinion
from moderation.guards.llama_guard import LlamaGuard
from moderation.guards.qwen3_guard import Qwen3Guard
from moderation.guards.remote import RemoteModeration
from moderation.guards.shield_gemma import ShieldGemma
from moderation.policy import Mode, Policy, Screen, Stage
from moderation.verdict import Action, Verdict

_log = logging.getLogger(__name__)


def guard_named(name: str) -> Guard:
    """Return the guard that a policy names; ValueError lists those there are."""
    known: dict[str, Guard] = {
        guard.name: guard
        for guard in (LlamaGuard(), ShieldGemma(), Qwen3Guard(), RemoteModeration())
    }
    if name not in known:
        raise ValueError(f"no guard {name!r}: one of {', '.join(known)}")
    return known[name]


def in_grey_band(verdict: Verdict, policy: Policy) -> bool:
    """Say whether the first screen is unsure: its highest harm lies in the policy's band."""
    stage = policy.second_stage
    if stage is None or verdict.action is Action.BLOCK:
        return False
    harms = [score for name, score in verdict.scores.items() if name != PROMPT_ATTACK]
    return stage.low <= max(harms, default=0.0) < stage.high


def asks_about_answers(policy: Policy) -> bool:
    """Say whether answers are held for the guard; a policy that only notes holds none back."""
    stage = policy.second_stage
    notes = policy.shadow or policy.mode in (Mode.OFF, Mode.ASYNC)
    return stage is not None and stage.answers and not notes


def consult(
    guard: Guard, complete: Complete, text: str, policy: Policy, verdict: Verdict, role: str
) -> Verdict:
    """Ask in threads, so that a callable that never returns costs no more than the deadline."""
    if policy.second_stage is None:
        return verdict
    questions = guard.questions(text, role)
    pool = ThreadPoolExecutor(len(questions), thread_name_prefix="tollhouse-guard")
    try:
        asked = [pool.submit(complete, question) for question in questions]
        left = policy.second_stage.deadline_ms / 1000
        opinion = guard.read([answer.result(timeout=left) for answer in asked])
    except (Exception, Late) as error:
        return unanswered(verdict, policy, guard, error)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return merged(verdict, opinion, policy, role)


async def consult_later(
    guard: Guard, complete: CompleteLater, text: str, policy: Policy, verdict: Verdict, role: str
) -> Verdict:
    """The same for an async callable; it is cancelled at the deadline."""
    if policy.second_stage is None:
        return verdict
    try:
        async with asyncio.timeout(policy.second_stage.deadline_ms / 1000):
            questions = guard.questions(text, role)
            answers: Sequence[str] = await asyncio.gather(*(complete(q) for q in questions))
        opinion = guard.read(answers)
    except Exception as error:
        return unanswered(verdict, policy, guard, error)
    return merged(verdict, opinion, policy, role)


def merged(verdict: Verdict, opinion: Opinion, policy: Policy, role: str) -> Verdict:
    """Decide anew: the guard's scores, the rules' spans as they were."""
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
        action=min(would, Action.ANNOTATE) if policy.shadow else would,
        would=would,
        scores=scores,
        flagged=tuple(sorted(flagged)),
    )


def _decided(screen: Screen, scores: dict[str, float]) -> tuple[Action, set[str]]:
    actions = {
        name: thresholds.action(scores.get(name, 0.0))
        for name, thresholds in screen.categories.items()
    }
    flagged = {name for name, action in actions.items() if action > Action.ALLOW}
    return max(actions.values(), default=Action.ALLOW), flagged


def unanswered(verdict: Verdict, policy: Policy, guard: Guard, error: BaseException) -> Verdict:
    """The guard gave no opinion: pass as unscanned where the policy is open, block otherwise."""
    # The kind alone: the message of an error may quote the text.
    _log.error("guard %s gave no opinion: %s", guard.name, type(error).__name__)
    if policy.open_on(Stage.GUARD):
        names = {*verdict.unscanned, Stage.GUARD.value}
        return replace(verdict, unscanned=tuple(sorted(names)))
    return replace(
        verdict,
        action=min(Action.BLOCK, Action.ANNOTATE) if policy.shadow else Action.BLOCK,
        would=Action.BLOCK,
        flagged=tuple(sorted({*verdict.flagged, "guard_failed"})),
    )
