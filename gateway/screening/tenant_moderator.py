"""Moderation by tenant policy: screens prompts, guards outputs, and records both."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Protocol

from msgspec.structs import replace
from prometheus_client import Counter

from core import metrics
from core.clock import Clock
from core.tenants.keys import Principal
from gateway.request.exchange import Headers
from gateway.request.inference import InferenceRequest
from gateway.request.output_guard import OutputGuard
from gateway.screening.decisions import DecisionLog
from gateway.screening.moderator import Continued, PromptBlocked, ScreeningResult
from gateway.screening.prompt_texts import screened_texts, with_redactions
from gateway.screening.second_opinions import SecondOpinions
from moderation.guard import Holds, StreamGuard
from moderation.policy import OFF, Payer, Policy
from moderation.screener import Screener, text_of
from moderation.second_stage import in_grey_band, reviews_answers
from moderation.verdict import ALLOW, BLOCK, REDACT, ScreenedText, Verdict
from moderation.verdict_cache import TenantVerdicts, VerdictCache

_INLINE_CHARACTERS = 4_000  # more text that was not screened before is screened in a thread
_THREADS = 2  # more would not help: the work holds the interpreter's lock


class Policies(Protocol):
    """Policies in force, read from memory."""

    def policy_of(self, principal: Principal) -> Policy: ...


class TenantModerator:
    def __init__(
        self,
        screener: Screener,
        policies: Policies,
        clock: Clock,
        log: DecisionLog,
        opinions: SecondOpinions | None = None,
    ) -> None:
        self._screener = screener
        self._policies = policies
        self._clock = clock
        self._log = log
        self._opinions = opinions
        self._known = VerdictCache(begun=log.begun)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="screening")

    async def screen(
        self, request_id: str, principal: Principal, request: InferenceRequest
    ) -> ScreeningResult:
        policy = self._policies.policy_of(principal)
        if not policy.roles:
            return ScreeningResult(request)
        texts = screened_texts(request)
        started = self._clock.monotonic()
        known = self._known.of(principal.tenant_id, policy)
        verdict = await self._screen(texts, policy, known)
        metrics.moderation_seconds.observe(self._clock.monotonic() - started)
        if self._opinions is not None and in_grey_band(verdict, policy):
            question = "\n\n".join(each.text for each in texts if policy.screens(each.role))
            verdict = await self._opinions.request(question, policy, verdict)
        _count_check("input", verdict)
        read = list(map(text_of, texts))
        whole = known.hashed(read) or "\0".join(read)
        self._log.record(request_id, principal, "input", verdict, whole)
        if verdict.blocked:
            raise PromptBlocked(
                f"The moderation policy blocked the prompt ({verdict.headline}).",
                next_step="Change the prompt, or ask your administrator about the policy.",
                param=_param_name(request),
                paid_by=_payer(verdict, policy.blocked_input_paid_by),
            )
        if verdict.action is REDACT:
            request = with_redactions(request, verdict.spans)
        action = "unscanned" if verdict.unscanned else _action_name(verdict)
        return ScreeningResult(request, action, _headers(verdict))

    async def _screen(
        self, texts: Sequence[ScreenedText], policy: Policy, known: TenantVerdicts
    ) -> Verdict:
        """Small work is done at once; large work in a thread, a step at a time, so that the large
        works of several requests take turns."""
        work = self._screener.prepare(texts, policy, known)
        if work.unseen <= _INLINE_CHARACTERS:
            return work.run()
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(self._threads, work.step):
            continue
        return work.verdict()

    def guard(
        self, request_id: str, principal: Principal, choices: int, before: Continued | None = None
    ) -> list[OutputGuard]:
        policy = self._policies.policy_of(principal)
        if policy.mode is OFF:
            return []
        answer = GuardedResponse(
            StreamGuard(policy, self._screener, before),
            policy,
            lambda verdict, text: self._log.record(request_id, principal, "output", verdict, text),
        )
        if self._opinions is not None and reviews_answers(policy):
            return [SecondOpinionGuard(answer, choice, self._opinions) for choice in range(choices)]
        return [ChoiceGuard(answer, choice) for choice in range(choices)]

    def close(self) -> None:
        """Write the gathered decisions to the spool."""
        self._log.flush()
        self._threads.shutdown(wait=False, cancel_futures=True)


class GuardedResponse:
    """State shared by the choices of one request. The verdict is recorded once, however it ends."""

    def __init__(
        self, stream: StreamGuard, policy: Policy, record: Callable[[Verdict, str], None]
    ) -> None:
        self.stream = stream
        self.policy = policy
        self.texts: list[str] = []
        self._record = record
        self._recorded = False
        self._decided: Verdict | None = None

    def verdict(self) -> Verdict:
        return self._decided or self.stream.verdict()

    def decided(self, verdict: Verdict) -> None:
        """Set the verdict of a second opinion; the strictest of all choices counts."""
        if self._decided is None or verdict.action > self._decided.action:
            self._decided = verdict

    def over(self) -> None:
        if self._recorded or not self.texts:
            return
        self._recorded = True
        verdict = self.verdict()
        _count_check("output", verdict)
        _count_holds(self.stream.holds())
        self._record(verdict, "".join(self.texts))


class ChoiceGuard:
    """The output guard of one choice."""

    needs_second_opinion = False
    undecided = False

    def __init__(self, answer: GuardedResponse, choice: int) -> None:
        self.blocked = False
        self.action: str | None = None
        self._answer = answer
        self._stream = answer.stream
        self._choice = choice

    @property
    def held(self) -> int:
        return self._stream.held(self._choice)

    @property
    def needed(self) -> int:
        return self._stream.needed(self._choice)

    @property
    def spare(self) -> int:
        return self._stream.spare(self._choice)

    @property
    def cuts(self) -> Sequence[tuple[int, int]]:
        return self._stream.cuts(self._choice)

    def clean(self, text: str, *, record: bool = False) -> str | None:
        cleaned = self._stream.clean(text, record=record)
        if record and cleaned != text:  # perhaps after `flush`, which has reported the text alone
            self.blocked = self.blocked or cleaned is None
            self.action = _action_name(self._stream.verdict())
        return cleaned

    @property
    def cut_paid_by(self) -> str:
        return _payer(self._answer.verdict(), self._answer.policy.cut_output_paid_by)

    def feed(self, text: str, *, last: bool = False) -> str:
        if not text:
            return ""
        self._answer.texts.append(text)
        release = self._stream.feed(self._choice, text, last=last)
        self.blocked = release.blocked
        if release.blocked:
            self.action = _action_name(self._stream.verdict())
        return release.text

    def flush(self) -> str:
        release = self._stream.finish(self._choice)
        self.blocked = release.blocked
        verdict = self._stream.verdict()
        self.action = "unscanned" if verdict.unscanned else _action_name(verdict)
        return release.text

    async def decide(self) -> str:
        return ""

    def over(self) -> None:
        self._answer.over()


class SecondOpinionGuard(ChoiceGuard):
    """Holds the whole choice; when the first guard is unsure at the end, a second opinion decides."""

    needs_second_opinion = True

    def __init__(self, answer: GuardedResponse, choice: int, opinions: SecondOpinions) -> None:
        super().__init__(answer, choice)
        self._opinions = opinions
        self._texts: list[str] = []
        self._length = 0  # characters of `_texts`
        self._released: list[str] = []  # text that the first guard released

    @property
    def held(self) -> int:
        return self._length

    def feed(self, text: str, *, last: bool = False) -> str:
        self._texts.append(text)
        self._length += len(text)
        self._released.append(super().feed(text, last=last))
        return ""

    def flush(self) -> str:
        self._released.append(super().flush())
        if self.blocked:
            return ""
        policy = self._answer.policy
        self.undecided = in_grey_band(self._stream.verdict(), policy)
        return "" if self.undecided else self._release_all()

    async def decide(self) -> str:
        verdict = self._stream.verdict()
        text = "".join(self._texts)
        decided = await self._opinions.request(text, self._answer.policy, verdict, "assistant")
        if decided.action is REDACT and verdict.action < REDACT:
            # The second opinion is on the whole text and gives no span to redact.
            decided = replace(decided, action=BLOCK)
        self._answer.decided(decided)
        self.blocked, self.undecided = decided.blocked, False
        self.action = "unscanned" if decided.unscanned else _action_name(decided)
        return "" if self.blocked else self._release_all()

    def _release_all(self) -> str:
        released, self._released, self._texts = "".join(self._released), [], []
        self._length = 0
        return released


def _param_name(request: InferenceRequest) -> str:
    if request.inputs is not None:
        return "input"
    return "messages" if request.messages is not None else "prompt"


def _count_check(direction: str, verdict: Verdict) -> None:
    action = "unscanned" if verdict.unscanned else verdict.action.word
    _checks(direction, action).inc()
    for category in verdict.flagged:
        metrics.moderation_flags.labels(category, action).inc()


def _count_holds(holds: Holds) -> None:
    metrics.moderation_longest_hold.observe(holds.longest)
    if holds.by_score:
        metrics.moderation_holds.labels("score").inc(holds.by_score)
    if holds.by_rule:
        metrics.moderation_holds.labels("rule").inc(holds.by_rule)


@cache
def _checks(direction: str, action: str) -> Counter:
    return metrics.moderation_checks.labels(direction, action)


def _payer(verdict: Verdict, payer: Payer) -> str:
    """The operator pays for a block caused by a failed stage, whatever the policy says."""
    failed = any(name.endswith("_failed") for name in verdict.flagged)
    return (Payer.OPERATOR if failed else payer).value


def _action_name(verdict: Verdict) -> str | None:
    return verdict.action.word if verdict.action > ALLOW else None


def _headers(verdict: Verdict) -> Headers:
    if verdict.unscanned:
        return [(b"x-tollhouse-moderation", b"unscanned")]
    if verdict.action is ALLOW:
        return []
    value = f"{verdict.action.word}; {', '.join(verdict.flagged)}"
    return [(b"x-tollhouse-moderation", value.encode())]
