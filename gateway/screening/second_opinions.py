"""Second opinions for uncertain scores, from guard models behind the router or remote APIs.

`TOLLHOUSE_GUARDS` configures the backend of each guard; a policy names the guard and its deadline.
The operator bears the cost: guard requests are not metered to a tenant.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from core import metrics
from core.clock import Clock
from core.errors import BadRequest, SettingError, Unavailable
from gateway.catalog.upstreams import HTTP
from moderation.guards.base import Guard
from moderation.guards.remote import RemoteModeration
from moderation.policy import Policy
from moderation.second_stage import consult_guard, find_guard, without_opinion
from moderation.verdict import Verdict

# The prefix cache namespace of guard prompts; no tenant has this name.
MAX_CHARACTERS = 16_000
_EXAMPLE = '[{"guard": "llama-guard", "model": "llama-guard-3-1b"}]'


@dataclass(frozen=True, slots=True)
class GuardBackend:
    """`model` is served by this gateway or, with `url`, by the remote API."""

    guard: str
    model: str = ""
    url: str = ""
    api_key: str = ""


def read_guards(setting: str) -> list[GuardBackend]:
    """Parses TOLLHOUSE_GUARDS: a JSON list of objects, or the path of a file with one."""
    text = setting.strip()
    if not text:
        return []
    if not text.startswith("[") and Path(text).is_file():
        text = Path(text).read_text(encoding="utf-8")
    try:
        listed = json.loads(text)
    except ValueError as error:
        raise _invalid_setting(
            f"it is neither valid JSON nor the path of a file: {error}"
        ) from None
    if not isinstance(listed, list):
        raise _invalid_setting("it must be a list of objects")
    backends = [_parse_guard(given, index) for index, given in enumerate(listed)]
    if len({backend.guard for backend in backends}) < len(backends):
        raise _invalid_setting("a guard is named twice")
    return backends


def _parse_guard(given: Any, index: int) -> GuardBackend:
    known = [field.name for field in fields(GuardBackend)]
    if not isinstance(given, dict) or not all(isinstance(each, str) for each in given.values()):
        raise _invalid_setting(f"entry {index} is not an object with string values")
    unknown = sorted(set(given) - set(known))
    if unknown or "guard" not in given:
        raise _invalid_setting(f"entry {index} takes {', '.join(known)}; guard is required")
    backend = GuardBackend(**given)
    try:
        remote = isinstance(find_guard(backend.guard), RemoteModeration)
    except ValueError as error:
        raise _invalid_setting(f"entry {index}: {error}") from None
    if remote and not backend.url.startswith(HTTP):
        raise _invalid_setting(
            f"entry {index} is a remote API and needs a url that begins with http:// or https://"
        )
    if not remote and not backend.model:
        raise _invalid_setting(f"entry {index} needs the model that serves {backend.guard}")
    return backend


def _invalid_setting(problem: str) -> SettingError:
    return SettingError(
        f"TOLLHOUSE_GUARDS is invalid: {problem}.", next_step=f"Use this form: {_EXAMPLE}."
    )


class GuardClient(Protocol):
    """A backend that answers a guard's questions."""

    guard: Guard

    async def answer(self, question: str) -> str: ...

    async def close(self) -> None: ...


class RemoteGuardClient:
    """A remote API with OpenAI's POST /v1/moderations."""

    def __init__(self, backend: GuardBackend) -> None:
        self.guard: Guard = RemoteModeration(backend.model) if backend.model else RemoteModeration()
        self._url = backend.url.rstrip("/").removesuffix("/v1") + "/v1/moderations"
        self._headers = {"content-type": "application/json"}
        if backend.api_key:
            self._headers["authorization"] = f"Bearer {backend.api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def answer(self, question: str) -> str:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        async with self._session.post(self._url, data=question.encode()) as answer:
            if answer.status != 200:
                raise Unavailable(f"The remote moderation API answered {answer.status}.")
            return await answer.text()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class SecondOpinions:
    def __init__(self, answers: Sequence[GuardClient], clock: Clock) -> None:
        self._by_name: Mapping[str, GuardClient] = {each.guard.name: each for each in answers}
        self._clock = clock

    def check(self, policy: Policy) -> None:
        """Raises BadRequest for a policy whose guard is not configured."""
        stage = policy.second_stage
        if stage is not None and stage.guard not in self._by_name:
            raise BadRequest(
                f"The guard {stage.guard} is not configured; configured: "
                f"{', '.join(self._by_name) or 'none'}.",
                next_step="Ask the operator to add it to TOLLHOUSE_GUARDS.",
                param="second_stage.guard",
            )

    async def request(
        self, text: str, policy: Policy, verdict: Verdict, role: str = "user"
    ) -> Verdict:
        """The verdict after the guard's answer; without an answer the policy's failure mode decides.
        `role` is the author of the text: `user` or `assistant`."""
        stage = policy.second_stage
        if stage is None:
            return verdict
        started = self._clock.monotonic()
        answers = self._by_name.get(stage.guard)
        if answers is None:
            missing = Unavailable(f"The guard {stage.guard} is not configured.")
            decided = without_opinion(verdict, policy, find_guard(stage.guard), missing)
        else:
            shortened = text[-MAX_CHARACTERS:]
            decided = await consult_guard(
                answers.guard, answers.answer, shortened, policy, verdict, role
            )
        metrics.moderation_guard_seconds.labels(stage.guard).observe(
            self._clock.monotonic() - started
        )
        return decided

    async def close(self) -> None:
        for each in self._by_name.values():
            await each.close()
