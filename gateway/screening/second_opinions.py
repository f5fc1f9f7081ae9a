"""Second opinions for uncertain scores, from guard models behind the router or remote APIs.

`TOLLHOUSE_GUARDS` configures the backend of each guard; a policy names the guard and its deadline.
The operator bears the cost: guard requests are not metered to a tenant.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from core import metrics
from core.clock import Clock
from core.errors import BadRequest, SettingError, Unavailable
from core.ids import REQUEST, new_id
from engine.protocol import SamplingParams
from gateway.catalog.catalog import Catalog, Target
from gateway.inference.request import InferenceRequest
from gateway.metering.receipt_log import GUARD_NAMESPACE
from gateway.prompts.prompt import Prompt
from gateway.prompts.tokenizing import TextCodec
from gateway.routing.router import Query, Router
from gateway.upstreams.base import EngineRequest, Generation, Job, TextChunk
from gateway.upstreams.config import HTTP
from moderation.guards.base import Guard
from moderation.guards.remote import RemoteModeration
from moderation.policy import Policy
from moderation.second_stage import consult_guard, find_guard, without_opinion
from moderation.verdict import Verdict

# The prefix cache namespace of guard prompts; no tenant has this name.
MAX_CHARACTERS = 16_000
_ANSWER_TOKENS = 24
_TIMEOUT_S = 60.0  # the policy's deadline cancels earlier
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


class ModelGuardClient:
    """A generative guard, on any replica behind the router that serves its model."""

    def __init__(self, backend: GuardBackend, catalog: Catalog, router: Router) -> None:
        self.guard = find_guard(backend.guard)
        self._model = backend.model
        self._catalog = catalog
        self._router = router

    async def answer(self, question: str) -> str:
        model = self._catalog.served(self._model)
        if model is None:
            raise Unavailable(f"This gateway does not serve the guard's model {self._model}.")
        # When the chat template holds the guard's task, the text is sent as a user message.
        chat = [{"role": "user", "content": question}] if self.guard.uses_chat_template else None
        request = InferenceRequest(
            route="guard",
            model=self._model,
            messages=chat,
            prompts=() if chat else (question,),
            temperature=0.0,
            max_tokens=_ANSWER_TOKENS,
        )
        ids = [0] * max(1, len(question) // 4)
        if model.codec is not None:
            ids = await asyncio.to_thread(_ids, model.codec, question, chat)
        request_id = new_id(REQUEST)
        sampling = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0)
        engine_request = EngineRequest(
            request_id, GUARD_NAMESPACE, ids, sampling, priority=1, deadline_s=_TIMEOUT_S
        )
        target = Target(self._model, model)
        prompt = Prompt(request, ids, _ANSWER_TOKENS)
        route = self._router.route(Query(target, prompt, GUARD_NAMESPACE))
        backend = route.next()
        if backend is None:
            raise route.refusal()
        route.sent()
        generation: Generation | None = None
        try:
            generation = await backend.client.generate(Job(engine_request, request))
            text, tokens = await _collect(generation)
            route.answered()
        finally:
            if generation is not None:
                generation.cancel()
            route.left(generation.receipt if generation is not None else None)
            self._router.acknowledge_soon(request_id)
        return text if model.codec is None else model.codec.decode(tokens)

    async def close(self) -> None:
        return


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


def make_second_opinions(
    backends: Sequence[GuardBackend], catalog: Catalog, router: Router, clock: Clock
) -> SecondOpinions:
    answers: list[GuardClient] = [
        RemoteGuardClient(backend) if backend.url else ModelGuardClient(backend, catalog, router)
        for backend in backends
    ]
    return SecondOpinions(answers, clock)


async def _collect(generation: Generation) -> tuple[str, list[int]]:
    text: list[str] = []
    tokens: list[int] = []
    while chunks := await generation.take():
        for chunk in chunks:
            if isinstance(chunk, TextChunk):
                text.append(chunk.text)
            else:
                tokens += chunk.tokens
    return "".join(text), tokens


def _ids(codec: TextCodec, question: str, chat: list[dict[str, Any]] | None) -> list[int]:
    """The guard's own markers become control tokens; `plain` has escaped those of the text."""
    if chat is None:
        return codec.encode(question)
    if codec.template is None:
        raise Unavailable("The guard's model has no chat template.")
    return codec.encode(codec.template.render(chat))
