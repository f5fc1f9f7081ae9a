"""The engine without its sockets: requests in, one step at a time, tokens and receipts out."""

import heapq
import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable

from engine.adapters.host_tier import Submit, read_inline
from engine.adapters.registry import AdapterRegistry
from engine.batch import Runner
from engine.cache.prefix import PUBLIC, PrefixHasher
from engine.cache.windowed import open_pool
from engine.config import EngineConfig
from engine.errors import AdapterError, IntegrityError, RequestError
from engine.metrics import Metrics, render
from engine.outputs.best_of import as_sampled
from engine.outputs.results import LaunchedStep, Outbox, OutputProcessor
from engine.outputs.searches import BeamSearches
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerateRequest,
    KvEvent,
)
from engine.receipts import Receipts
from engine.scheduling.fairness import ServiceCounters
from engine.scheduling.scheduler import NeedsCollect, Scheduler
from engine.scheduling.sequence import Request, Sequence, SequenceStatus
from engine.scheduling.step_shares import share_time
from engine.scheduling.step_table import StepTable
from engine.scheduling.validate import check_queue, check_request, with_pooling
from engine.scheduling.waiting import WaitingQueue
from engine.tiers.open import open_transfers

log = logging.getLogger("tollhouse.engine")

_SLACK_DEADLINES = 1000  # of ended requests in the heap before they are removed


class Engine:
    """Composes scheduler, pool, adapters and runner. Call it from one thread only."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        submit: Submit = read_inline,
    ) -> None:
        self.config = config
        self.info: EngineInfo = runner.info
        self.metrics = Metrics()
        self.step_table = StepTable()
        self.metrics.step_cells = self.step_table.samples
        self.receipts = Receipts(config.receipts_kept, config.receipts_file, config.receipts_days)
        self.pool = open_pool(config, self.info.num_blocks, runner.windowed)
        self.adapters = AdapterRegistry(config, runner, self.pool, self.metrics, submit)
        hasher = PrefixHasher(
            self.info.base_digest, self.info.dtype, config.block_size, config.public_prefixes
        )
        fair = config.fairness == "vtc"
        waiting = WaitingQueue(
            ServiceCounters(), fair=fair, quantum=config.locality_quantum if fair else 0.0
        )
        self.scheduler = Scheduler(
            config,
            self.pool,
            hasher,
            self.adapters,
            waiting,
            self.metrics,
            sight=runner.sight,
            drafter=runner.drafter,
            forced=runner.forced,
        )
        self._results = OutputProcessor(
            config,
            self.scheduler,
            self.pool,
            self.metrics,
            self.receipts,
            frozenset(self.info.eos_token_ids),
        )
        self._runner = runner
        self.metrics.expert_rows = runner.expert_rows
        self._clock = clock
        keys = self.scheduler.keys
        self.tiers = open_transfers(config, runner, self.pool, keys, self.metrics, clock)
        self._overlap = runner.overlapped if config.overlap is None else config.overlap
        # They do not keep the engine, nor with it the runner's memory.
        self.searches = BeamSearches(
            weakref.proxy(self), self.receipts, frozenset(self.info.eos_token_ids), clock
        )
        # Called with the requests, by gateway, that the step about to be launched begins.
        self.on_begin: Callable[[dict[str, list[str]]], None] | None = None
        self._launched: LaunchedStep | None = None
        self._last_end = 0.0
        self._deadlines: list[tuple[float, str]] = []
        self.requests: dict[str, Request] = {}
        self.failures_in_a_row = 0

    # Calls of gateways.

    def submit(self, inputs: GenerateRequest, origin: str) -> None:
        """Queue a request of the gateway `origin`. Raises RequestError or AdapterError."""
        try:
            self._submit(inputs, origin)
        except (RequestError, AdapterError) as error:
            self.metrics.refuse(error.code)
            raise

    def _submit(self, inputs: GenerateRequest, origin: str) -> None:
        if any(inputs.request_id in each for each in (self.requests, self.searches, self.receipts)):
            raise RequestError(
                "duplicate_request", f"{inputs.request_id} was sent before: use a new id"
            )
        check_queue(self.scheduler.waiting, inputs, self.config)
        if inputs.sampling.prompt_logprobs is not None and not self._runner.scores_prompts:
            raise RequestError(
                "unsupported_parameter",
                "prompt_logprobs is computed on a CPU only: leave it out, or use an engine on a CPU",
            )
        inputs = with_pooling(inputs, self.info)
        blocks = 0 if inputs.adapter is None else self._adapter_blocks(inputs.adapter)
        limit = check_request(inputs, self.info, self.config, blocks, self._runner)
        grammar = inputs.sampling.grammar
        compiled = None if grammar is None else self._runner.prepare_grammar(grammar)
        if inputs.sampling.use_beam_search:
            self.searches.start(inputs, origin, limit)
            return
        self.enqueue(inputs, origin, limit)
        self.requests[inputs.request_id].grammar = compiled

    def enqueue(self, inputs: GenerateRequest, origin: str, limit: int) -> None:
        """A request that is checked. `limit`: of its prompt and output together."""
        kept = self.config.kv_sight.most
        size = self.config.block_size if self.config.kv_heavy else 0
        request = as_sampled(
            Request(inputs, origin, self._clock(), limit, kept=kept, block_size=size)
        )
        if inputs.adapter is not None:
            self.adapters.accept(inputs.adapter)
        self.scheduler.submit(request)
        self.requests[inputs.request_id] = request
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, inputs.request_id))
            if len(self._deadlines) > _SLACK_DEADLINES + 2 * len(self.requests):
                self._deadlines = [each for each in self._deadlines if each[1] in self.requests]
                heapq.heapify(self._deadlines)

    def abandon(self, message: str) -> None:
        """Write a receipt for every open request, before the process ends."""
        self._results.abandon(list(self.requests.values()), self._clock(), message)

    def _adapter_blocks(self, digest: str) -> int:
        if not self.config.enable_lora:
            raise AdapterError("adapter_not_found", "this engine runs without adapters")
        return self.adapters.find(digest).blocks_needed

    def abort(self, request_id: str, origin: str | None = None) -> bool:
        """Abort an open request, of the gateway `origin` if that is given. Whether there was one."""
        if self.searches.abort(request_id, origin):
            return True
        request = self.requests.get(request_id)
        if request is None or request.settled or not request.open:
            return False
        if origin not in (None, request.origin):
            return False
        self._results.end_request(request, FinishReason.ABORT, self._clock())
        return True

    def abort_origin(self, origin: str) -> int:
        """End the requests of a gateway that is gone; their receipts are kept. Returns how many."""
        ids = [i for i, r in self.requests.items() if r.origin == origin]
        ids += self.searches.of(origin)
        return sum(self.abort(request_id) for request_id in ids)

    def under_way(self, origin: str) -> list[str]:
        """The ids of a gateway's requests that have not ended."""
        open_ = [i for i, r in self.requests.items() if r.origin == origin and r.open]
        return open_ + self.searches.of(origin)

    def add_adapter(self, path: str, state: AdapterState) -> AdapterState:
        """Register an adapter that `adapters.host.read` read into host memory. Raises
        AdapterError."""
        blocks_needed = self._runner.adapter_blocks(state.digest)
        refusal = None
        if not self.config.enable_lora:
            refusal = "lora_disabled", "this engine was started without adapters"
        elif state.rank > self.config.max_lora_rank:
            most = self.config.max_lora_rank
            refusal = "adapter_rank", f"{path} has rank {state.rank}, max_lora_rank is {most}"
        elif blocks_needed >= self.pool.num_blocks:
            all_blocks = self.pool.num_blocks
            refusal = (
                "adapter_too_large",
                f"{path} needs {blocks_needed} of {all_blocks} blocks: raise kv_memory_bytes",
            )
        if refusal is not None:
            self._runner.drop_adapter(state.digest)
            raise AdapterError(*refusal)
        return self.adapters.register(path, state).state()

    def load_adapter(self, path: str) -> AdapterState:
        """Read and register an adapter at once, for callers without a loader thread."""
        return self.add_adapter(path, self._runner.register_adapter(path))

    def unload_adapter(self, digest: str) -> AdapterState:
        return self.adapters.retire(digest)

    # The step.

    @property
    def busy(self) -> bool:
        """Whether there are requests to step for."""
        return bool(self.requests)

    def step(self) -> bool:
        """Run one step. False when nothing could run: the caller should wait for a message, an
        adapter read or a deadline."""
        now = self._clock()
        self._expire(now)
        self.poll()
        launched = self._launch(now)
        if launched is None and self._launched is None:
            return False
        if self._overlap:
            launched, self._launched = self._launched, launched
        if launched is not None:
            self._collect(launched)
        return True

    def poll(self) -> None:
        """Process finished reads; requests whose adapter failed to load end."""
        self.receipts.retry()
        self.tiers.poll(idle=not self.busy)
        for adapter in self.adapters.poll():
            for request in list(self.requests.values()):
                if request.inputs.adapter == adapter.digest and request.open:
                    self._results.end_request(
                        request, FinishReason.ERROR, self._clock(), adapter.failure
                    )

    def take_outboxes(self) -> dict[str, Outbox]:
        """Chunks and receipts by gateway since the last call; forgets the ended requests."""
        outboxes, self._results.outboxes = self._results.outboxes, {}
        ended, self._results.ended = self._results.ended, []
        for request in ended:
            del self.requests[request.inputs.request_id]
            request.grammar = None
            if request.inputs.adapter is not None:
                self.adapters.request_ended(request.inputs.adapter)
            for seq in request.sequences:
                self._runner.forget(seq.number)
                self.scheduler.speculation.forget(seq)
                self.tiers.forget(seq)
        return self.searches.collect(outboxes)

    def discard_outbox(self, origin: str) -> None:
        """Discard the output queued for a gateway that reconnects; its receipts stay stored."""
        self._results.outboxes.pop(origin, None)

    def take_events(self) -> list[KvEvent]:
        """Blocks stored and removed since the last call; empty unless `pool.events` is a list."""
        events = self.pool.events or []
        if events:
            self.pool.events = []
        return events

    def close(self) -> None:
        self.tiers.close()
        self.receipts.close()

    def _launch(self, now: float) -> LaunchedStep | None:
        try:
            batch = self.scheduler.schedule(now)
        except NeedsCollect:
            self._drain_launched()
            batch = self.scheduler.schedule(self._clock())
        if batch is None:
            return None
        rows = self.scheduler.rows
        if self.scheduler.begun:
            self._announce()
        try:
            ticket = self._runner.launch(batch)
        except IntegrityError:
            raise
        except Exception as error:
            self._failed(LaunchedStep(rows, None, now), error)
            return None
        return LaunchedStep(rows, ticket, now)

    def _announce(self) -> None:
        begun, self.scheduler.begun = self.scheduler.begun, []
        if self.on_begin is None:
            return
        by_gateway: dict[str, list[str]] = {}
        for request in begun:
            origin, name = self.searches.asked_by(request.origin, request.inputs.request_id)
            by_gateway.setdefault(origin, []).append(name)
        self.on_begin(by_gateway)

    def _drain_launched(self) -> None:
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._collect(launched)

    def _collect(self, launched: LaunchedStep) -> None:
        try:
            sampled = self._runner.collect(launched.ticket)
        except IntegrityError:
            raise
        except Exception as error:
            self._failed(launched, error)
            return
        now = self._clock()
        self.failures_in_a_row = 0
        elapsed = now - max(launched.launched_at, self._last_end)
        self._last_end = now
        share_time(launched.rows, elapsed, self._runner.work)
        self._results.accept(launched, sampled, now)
        tokens = sum(len(row.tokens) for _, row in launched.rows)
        self.scheduler.timing.record(elapsed, tokens)
        self.scheduler.speculation.record(launched.rows, elapsed)
        self.metrics.step(elapsed, tokens)
        self.step_table.record(launched.rows, elapsed)

    def _failed(self, launched: LaunchedStep, error: Exception) -> None:
        log.exception("a step failed: its %d sequences end with an error", len(launched.rows))
        self.failures_in_a_row += 1
        self.metrics.add("step_failures")
        self._results.fail(launched, f"{type(error).__name__}: {error}", self._clock())

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            request = self.requests.get(request_id)
            if request is not None and request.open and (request.deadline or now + 1) <= now:
                self._results.end_request(
                    request, FinishReason.DEADLINE, now, f"{request.inputs.deadline_s:g} s passed"
                )

    # Reporting.

    def gauges(self) -> dict[str, float]:
        used = self.pool.num_blocks - self.pool.free_blocks
        return {
            "running": len(self.scheduler.running),
            "waiting": self.scheduler.waiting.size,
            "kv_usage": used / self.pool.num_blocks,
            "blocks_free": self.pool.free_blocks,
            "receipts_open": len(self.receipts),
            "receipts_unwritten": self.receipts.unwritten,
            "batch_invariant": int(self.info.batch_invariant),
        }

    def metrics_text(self, extra_gauges: dict[str, float] | None = None) -> str:
        """Prometheus text. Safe to call from another thread: it reads copies and whole numbers."""
        self.metrics.counters["receipts_lost"] = self.receipts.lost
        requests = list(self.requests.values())
        adapters_in_use = [
            (r.inputs.adapter, r.admitted_at is not None) for r in requests if r.inputs.adapter
        ]
        lora = {
            "max_lora": str(self.config.max_adapter_slots),
            "running_lora_adapters": ",".join(
                sorted({a for a, running in adapters_in_use if running})
            ),
            "waiting_lora_adapters": ",".join(
                sorted({a for a, running in adapters_in_use if not running})
            ),
        }
        by_state = Counter(state.state for state in self.adapters.states())
        gauges = {**self.gauges(), **(extra_gauges or {})}
        return render(self.metrics, gauges, self.info.model, by_state, lora)

    def stats(self, *, changes_only: bool = False) -> EngineStats:
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting.size,
            blocks_free=self.pool.free_blocks,
            blocks_total=self.pool.num_blocks,
            tokens_waiting=self.scheduler.waiting.tokens,
            adapters=self.adapters.changes() if changes_only else self.adapters.states(),
        )

    def check_integrity(self) -> None:
        """Compare blocks, slots, queue and sequences with each other; raises IntegrityError. The
        server calls it whenever the engine becomes idle."""
        held = [*self.adapters.blocks_held(), *self.scheduler.tables.copied()]
        parts = list(held)
        users: Counter[str] = Counter()
        for request in self.requests.values():
            for seq in request.sequences:
                held.extend(seq.held_blocks)
                parts.extend(seq.held_parts)
                users.update([seq.handle.digest] if seq.handle else [])
                self._check_owner(seq)
                if (seq.status is SequenceStatus.RUNNING) != (seq in self.scheduler.running):
                    raise IntegrityError(f"sequence {seq.number} must not be {seq.status} now")
        self.pool.check_integrity(held)
        self.pool.check_parts(parts)
        self.adapters.check_integrity(users)
        waiting = list(self.scheduler.waiting)
        if len(waiting) != self.scheduler.waiting.size:
            raise IntegrityError(
                f"the queue has {len(waiting)} sequences and counts another number"
            )

    def _check_owner(self, seq: Sequence) -> None:
        allowed = (seq.request.inputs.namespace, PUBLIC)
        for block in seq.held_blocks:
            if self.pool.keys[block] is not None and self.pool.owners[block] not in allowed:
                raise IntegrityError(f"sequence {seq.number} reads another tenant's block {block}")
