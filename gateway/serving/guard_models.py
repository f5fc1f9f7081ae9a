"""Guard models that this gateway serves: they answer through the router, like any request."""

import asyncio
from collections.abc import Sequence
from typing import Any

from core.clock import Clock
from core.errors import Unavailable
from core.ids import REQUEST, new_id
from engine.protocol import GenerateRequest, SamplingParams
from gateway.catalog.catalog import Catalog, Target
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.engines.routing.router import Query, Router
from gateway.metering.engine_receipts import GUARD_NAMESPACE
from gateway.prompts.prompt import Prompt
from gateway.request.engine import Generation, Job, TextChunk
from gateway.request.inference import InferenceRequest
from gateway.screening.second_opinions import (
    GuardBackend,
    GuardClient,
    RemoteGuardClient,
    SecondOpinions,
)
from moderation.second_stage import find_guard

_ANSWER_TOKENS = 24
_TIMEOUT_S = 60.0  # the policy's deadline cancels earlier


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
        engine_request = GenerateRequest(
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
