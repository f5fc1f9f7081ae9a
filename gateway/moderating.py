"""The safety desk of the pipeline: the prompt is screened, the answer guarded, both are recorded."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from core import metrics
from core.clock import Clock
from core.errors import ContentBlocked
from core.events import ModerationEvent
from core.tenants.keys import Principal
from gateway.ask import Ask
from gateway.exchange import Headers
from gateway.safety import Screened
from gateway.streaming import OutputGuard
from moderation.guard import StreamGuard
from moderation.policy import Mode, Policy
from moderation.screener import Screener
from moderation.verdict import Action, ScreenedText, Verdict

_INLINE_CHARACTERS = 4_000  # more is screened in a thread


class Policies(Protocol):
    """In memory, refreshed off the path."""

    def policy_of(self, principal: Principal) -> Policy: ...


class ModerationDesk:
    def __init__(
        self,
        screener: Screener,
        policies: Policies,
        clock: Clock,
        note: Callable[[ModerationEvent], None],
    ) -> None:
        self._screener = screener
        self._policies = policies
        self._clock = clock
        self._note = note

    async def screen(self, request_id: str, principal: Principal, ask: Ask) -> Screened:
        policy = self._policies.policy_of(principal)
        texts = _texts_of(ask)
        started = self._clock.monotonic()
        if sum(len(each.text) for each in texts) > _INLINE_CHARACTERS:
            verdict = await asyncio.to_thread(self._screener.check_input, texts, policy)
        else:
            verdict = self._screener.check_input(texts, policy)
        metrics.moderation_seconds.observe(self._clock.monotonic() - started)
        _count("input", verdict)
        action = "unscanned" if verdict.unscanned else _word(verdict)
        if verdict.would > Action.ALLOW or verdict.unscanned:
            whole = "\x00".join(each.text for each in texts)
            self._note(self._event(request_id, principal, "input", verdict, whole))
        if verdict.blocked:
            raise ContentBlocked(
                f"The prompt was refused by the moderation policy ({verdict.headline}).",
                next_step="Change the prompt, or speak to your administrator about the policy.",
                param="messages" if ask.messages is not None else "prompt",
            )
        redacted = verdict.action is Action.REDACT
        return Screened(
            _with_texts(ask, verdict.texts) if redacted else ask, action, _headers(verdict)
        )

    def guard(self, request_id: str, principal: Principal, choices: int) -> list[OutputGuard]:
        policy = self._policies.policy_of(principal)
        if policy.mode is Mode.OFF:
            return []
        stream = StreamGuard(policy, self._screener)

        def _ended(text: str) -> str | None:
            verdict = stream.verdict()
            _count("output", verdict)
            if verdict.would > Action.ALLOW or verdict.unscanned:
                self._note(self._event(request_id, principal, "output", verdict, text))
            return _word(verdict)

        return [ChoiceGuard(stream, choice, _ended) for choice in range(choices)]

    def _event(
        self, request_id: str, principal: Principal, direction: str, verdict: Verdict, text: str
    ) -> ModerationEvent:
        return ModerationEvent(
            request_id=request_id,
            tenant_id=principal.tenant_id,
            project_id=principal.project_id,
            key_id=principal.key_id,
            at=self._clock.now(),
            direction=direction,
            action=verdict.action.word,
            policy_version=verdict.policy_version,
            text_sha256=hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(),
            categories=verdict.flagged,
            scores={name: round(score, 4) for name, score in verdict.scores.items()},
            spans=tuple((each.start, each.end, each.category) for each in verdict.spans[:100]),
            view=verdict.view,
            unscanned=bool(verdict.unscanned),
        )


class ChoiceGuard:
    """One choice's end of the request's guard."""

    def __init__(
        self, stream: StreamGuard, choice: int, ended: Callable[[str], str | None]
    ) -> None:
        self.blocked = False
        self.action: str | None = None
        self._stream = stream
        self._choice = choice
        self._ended = ended
        self._came: list[str] = []

    @property
    def held(self) -> int:
        return self._stream.held(self._choice)

    def feed(self, text: str) -> str:
        if not text:
            return ""
        self._came.append(text)
        release = self._stream.feed(self._choice, text)
        self.blocked = release.blocked
        if release.blocked:
            self.action = self._ended("".join(self._came))
        return release.text

    def flush(self) -> str:
        release = self._stream.finish(self._choice)
        self.blocked = release.blocked
        self.action = self._ended("".join(self._came))
        return release.text


def _texts_of(ask: Ask) -> list[ScreenedText]:
    if ask.messages is None:
        return [ScreenedText("user", ask.prompt)] if isinstance(ask.prompt, str) else []
    found: list[ScreenedText] = []
    for message in ask.messages:
        role = str(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            found.append(ScreenedText(role, content))
        elif isinstance(content, list):
            found += [ScreenedText(role, part["text"]) for part in content]
    return found


def _with_texts(ask: Ask, texts: Sequence[str]) -> Ask:
    """The same request with its texts replaced, in the order in which `_texts_of` gave them."""
    if ask.messages is None:
        return replace(ask, prompt=texts[0])
    left = iter(texts)
    messages: list[dict[str, Any]] = []
    for message in ask.messages:
        content = message.get("content")
        if isinstance(content, str):
            messages.append({**message, "content": next(left)})
        elif isinstance(content, list):
            parts = [{**part, "text": next(left)} for part in content]
            messages.append({**message, "content": parts})
        else:
            messages.append(message)
    return replace(ask, messages=messages)


def _count(direction: str, verdict: Verdict) -> None:
    action = "unscanned" if verdict.unscanned else verdict.action.word
    metrics.moderation_checks.labels(direction, action).inc()
    for category in verdict.flagged:
        metrics.moderation_flags.labels(category, action).inc()


def _word(verdict: Verdict) -> str | None:
    return verdict.action.word if verdict.action > Action.ALLOW else None


def _headers(verdict: Verdict) -> Headers:
    if verdict.unscanned:
        return [(b"x-tollhouse-moderation", b"unscanned")]
    if verdict.action is Action.ALLOW:
        return []
    told = f"{verdict.action.word}; {', '.join(verdict.flagged)}"
    return [(b"x-tollhouse-moderation", told.encode())]
