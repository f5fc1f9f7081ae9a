"""An engine without a model, for demos and tests: it repeats the prompt's ids at a fixed rate.

Its counts are exact. A prompt that the same namespace has sent before counts as cached, in blocks
of 16 tokens.
"""

import asyncio
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from core.errors import BadRequest
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    PromptLogprob,
    Receipt,
    TokenChunk,
    TokenLogprob,
)
from gateway.request.engine import (
    Generation,
    Job,
    Mailbox,
    RequestStillRunning,
    StartupProgress,
    engine_unavailable,
    reporting,
)


class FakeEngine:
    speaks_text = False
    refusal = ""

    def __init__(
        self,
        *,
        engine_id: str = "fake",
        model: str = "fake",
        context_length: int = 4096,
        vocab_size: int = 4096,
        eos_token_ids: tuple[int, ...] = (0,),
        token_delay_s: float = 0.0,
        load_s: float = 0.0,
        adapter_load_s: float = 0.0,
    ) -> None:
        self.engine_id = engine_id
        self.on_receipt: Callable[[str, Receipt], None] | None = None
        self.token_delay_s = token_delay_s
        self.load_s = load_s  # seconds from the start until it is healthy
        self.adapter_load_s = adapter_load_s
        self._started = time.monotonic()
        self.hangs = False  # simulates a missing heartbeat
        self._last_output = 0.0
        self.script: list[int] | None = None  # ids to generate instead of the prompt's
        self.submitted: list[GenerateRequest] = []
        self.receipts_given: dict[str, Receipt] = {}
        self._info = EngineInfo(
            engine_id=engine_id,
            model=model,
            base_digest="0" * 64,
            context_length=context_length,
            vocab_size=vocab_size,
            block_size=16,
            num_blocks=1024,
            eos_token_ids=eos_token_ids,
            dtype="float32",
            max_lora_rank=64,
            tokenizer_digest="",
        )
        self._adapters: dict[str, AdapterState] = {}
        self._receipts: dict[str, Receipt] = {}
        self._running: dict[str, tuple[asyncio.Task[None], Mailbox]] = {}
        self._aborted: set[str] = set()
        self._seen: set[tuple[str, str | None, tuple[int, ...]]] = set()
        self._alive = True

    async def start(self) -> None:
        self._alive = True
        self._started = time.monotonic()

    async def close(self) -> None:
        tasks = [task for task, _ in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def info(self) -> EngineInfo | None:
        return self._info

    def stats(self) -> EngineStats | None:
        return EngineStats(
            running=len(self._running),
            waiting=0,
            blocks_free=1024,
            blocks_total=1024,
            tokens_waiting=0,
            adapters=list(self._adapters.values()),
        )

    def healthy(self) -> bool:
        return self._alive and time.monotonic() - self._started >= self.load_s

    def silent(self) -> bool:
        return self.hangs

    def last_output(self) -> float:
        return self._last_output

    async def generate(self, job: Job) -> Generation:
        engine_request = job.engine_request
        if not self._alive:
            raise engine_unavailable(self.engine_id, "it was stopped")
        if engine_request.adapter is not None and engine_request.adapter not in self._adapters:
            raise BadRequest("The engine has no such adapter.", code="adapter_not_found")
        self.submitted.append(engine_request)
        mailbox = Mailbox(engine_request.request_id, self._aborted.add, reporting(self))
        task = asyncio.create_task(self._run(engine_request, mailbox))
        self._running[engine_request.request_id] = (task, mailbox)
        return mailbox

    def startup_progress(self) -> StartupProgress | None:
        spent = time.monotonic() - self._started
        return (
            StartupProgress(spent, self.load_s - spent)
            if self._alive and spent < self.load_s
            else None
        )

    def adapters(self) -> Mapping[str, AdapterState]:
        return self._adapters

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        await asyncio.sleep(self.adapter_load_s)
        state = AdapterState(digest=path.rpartition("/")[2], state="host", rank=8, generation=1)
        self._adapters[state.digest] = state
        return state

    async def unload_adapter(self, digest: str) -> None:
        self._adapters.pop(digest, None)

    async def receipt(self, request_id: str) -> Receipt | None:
        if request_id in self._running:
            raise RequestStillRunning("The request still runs.")
        return self._receipts.get(request_id)

    async def acknowledge(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._receipts.pop(request_id, None)

    def die(self) -> None:
        """Simulate a killed process: every stream fails and no receipt is written."""
        self._alive = False
        for task, mailbox in list(self._running.values()):
            task.cancel()
            mailbox.fail(engine_unavailable(self.engine_id, "the connection was lost"))
        self._running.clear()

    async def _run(self, engine_request: GenerateRequest, mailbox: Mailbox) -> None:
        started = time.monotonic()
        cached = self._cached(engine_request)
        generated, reason = 0, FinishReason.LENGTH
        limit = engine_request.sampling.max_tokens
        scores = self._scores(engine_request)
        if engine_request.sampling.pooling:
            mailbox.put(self._embedding(engine_request))
        elif not limit:
            chunk = TokenChunk(engine_request.request_id, 0, [], None, reason, scores)
            for choice in range(engine_request.sampling.n):
                mailbox.put(replace(chunk, choice=choice))
        for index in range(limit):
            await asyncio.sleep(self.token_delay_s)
            if engine_request.request_id in self._aborted:
                reason = FinishReason.ABORT
                break
            if (
                engine_request.deadline_s is not None
                and time.monotonic() - started > engine_request.deadline_s
            ):
                reason = FinishReason.DEADLINE
                break
            self._last_output = time.monotonic()
            source = self.script or engine_request.prompt
            token = source[index % len(source)]
            generated += engine_request.sampling.n
            last = FinishReason.LENGTH if index == limit - 1 else None
            if self.script is not None and index == len(self.script) - 1:
                last = reason = FinishReason.STOP
            logprobs = self._logprobs(token, engine_request.sampling.logprobs)
            for choice in range(engine_request.sampling.n):
                name = engine_request.request_id
                mailbox.put(TokenChunk(name, choice, [token], logprobs, last, scores))
                scores = None
            if last is FinishReason.STOP:
                break
        receipt = Receipt(
            request_id=engine_request.request_id,
            namespace=engine_request.namespace,
            adapter=engine_request.adapter,
            prompt=len(engine_request.prompt),
            cached=cached,
            computed=len(engine_request.prompt) - cached,
            unprocessed=0,
            generated=generated,
            delivered=generated,
            recomputed=0,
            discarded=0,
            finish_reason=reason,
            queue_s=0.0,
            prefill_s=0.0,
            decode_s=time.monotonic() - started,
            note=engine_request.note,
            busy_us=round((time.monotonic() - started) * 1e6),
        )
        self._receipts[engine_request.request_id] = self.receipts_given[
            engine_request.request_id
        ] = receipt
        self._running.pop(engine_request.request_id, None)
        self._aborted.discard(engine_request.request_id)
        mailbox.finish(receipt)

    def _embedding(self, engine_request: GenerateRequest) -> TokenChunk:
        """How often each of eight classes of ids occurs."""
        counts = [0.0] * 8
        for token in engine_request.prompt:
            counts[token % 8] += 1
        packed = struct.pack("<8f", *counts)
        name = engine_request.request_id
        return TokenChunk(name, 0, [], finish_reason=FinishReason.LENGTH, embedding=packed)

    def _logprobs(self, token: int, alternatives: int | None) -> list[TokenLogprob] | None:
        """The token itself is the most likely alternative, followed by the next ids."""
        if alternatives is None:
            return None
        others = [(token + i) % self._info.vocab_size for i in range(alternatives)]
        return [TokenLogprob(token, -0.5, tuple((t, -0.5 - i) for i, t in enumerate(others)))]

    def _scores(self, engine_request: GenerateRequest) -> list[PromptLogprob] | None:
        """Each token has rank 2, after the next id."""
        wanted, prompt = engine_request.sampling.prompt_logprobs, engine_request.prompt
        if wanted is None:
            return None
        top = [((t + 1) % self._info.vocab_size, -0.25) for t in prompt]
        scores = [
            PromptLogprob(token, -1.5, 2, (best,)[:wanted])
            for token, best in zip(prompt, top, strict=True)
        ]
        return [PromptLogprob(prompt[0]), *scores[1:]]

    def _cached(self, engine_request: GenerateRequest) -> int:
        if engine_request.sampling.prompt_logprobs is not None:
            return 0
        key = (engine_request.namespace, engine_request.adapter, tuple(engine_request.prompt))
        known = key in self._seen
        self._seen.add(key)
        return (len(engine_request.prompt) - 1) // 16 * 16 if known else 0
