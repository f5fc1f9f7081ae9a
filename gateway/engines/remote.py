"""Client of an engine worker in another process, over ZeroMQ."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial

from core.errors import (
    BadRequest,
    ContextLengthExceeded,
    DependencyDown,
    RateLimited,
    TollhouseError,
    Unavailable,
)
from engine.errors import AdapterError, ConnectionLost, EngineError
from engine.protocol import (
    AdapterState,
    EngineInfo,
    EngineStats,
    KvEvent,
    Receipt,
    TokenChunk,
)
from engine.worker.client import EngineClient as Wire
from engine.worker.client import Item
from engine.worker.curve import ClientKeys
from gateway.engines.model_identity import PLAIN, Entry, ModelIdentity
from gateway.prompts.grammars import grammar_field
from gateway.request.engine import (
    Generation,
    Job,
    Mailbox,
    RequestStillRunning,
    StartupProgress,
    engine_lost,
    engine_unavailable,
    reporting,
)
from gateway.request.inference import InferenceRequest

log = logging.getLogger("tollhouse.engine")
_RETRY_S = 5.0
_LOOK_S = 0.2
_EXPECTED_S = 1800.0  # an engine that is away for longer is not expected back


class _Sink:
    """Passes the items of the engine's client to a request's mailbox."""

    def __init__(
        self,
        mailbox: Mailbox,
        translated: Callable[[EngineError], TollhouseError],
        stray: Callable[[Receipt], None],
    ) -> None:
        self._mailbox = mailbox
        self._translated = translated
        self._stray = stray

    def put_nowait(self, item: Item) -> None:
        if isinstance(item, TokenChunk):
            self._mailbox.put(item)
        elif isinstance(item, Receipt):
            if self._mailbox.given_up:
                self._stray(item)
            else:
                self._mailbox.finish(item)
        elif isinstance(item, ConnectionLost):
            self._mailbox.lose(self._translated(item))
        else:
            known = item if isinstance(item, EngineError) else EngineError("unknown", str(item))
            self._mailbox.fail(self._translated(known))


class RemoteEngine:
    """`engine_id` is the replica's name, which stays the same when its process restarts."""

    speaks_text = False

    def __init__(
        self,
        engine_id: str,
        address: str,
        *,
        keys: ClientKeys | None = None,
        identity: ModelIdentity | None = None,
        entry: Entry = PLAIN,
        on_kv_events: Callable[[list[KvEvent]], None] | None = None,
        on_stray_receipt: Callable[[str, Receipt], None] | None = None,
    ) -> None:
        """`on_stray_receipt` gets receipts whose request is over here, to record and acknowledge."""
        self.engine_id = engine_id
        self.on_receipt: Callable[[str, Receipt], None] | None = None
        self.address = address
        self._keys = keys
        self.identity = identity
        self._entry = entry
        self._other = ""  # how what the engine serves differs from what its name promises
        self._on_kv_events = on_kv_events
        self._on_stray_receipt = on_stray_receipt
        self._wire: Wire | None = None
        self._compared: EngineInfo | None = None
        self._away_since = time.monotonic()
        self._startup_s = 0.0  # seconds that the last start or reconnect took
        self._connecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._wire = Wire(
            self.address,
            keys=self._keys,
            on_kv_events=self._on_kv_events,
            on_receipt=self._stray,
        )
        self._away_since = time.monotonic()
        self._connecting = asyncio.create_task(self._connect(self._wire))

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._wire is not None:
            await self._wire.close()
            self._wire = None

    def info(self) -> EngineInfo | None:
        try:
            return self._wire.info if self._wire is not None else None
        except ConnectionLost:
            return None

    def stats(self) -> EngineStats | None:
        return self._wire.stats if self._wire is not None else None

    def healthy(self) -> bool:
        wire = self._wire
        if wire is None or not wire.connected or self._is_other_model(wire):
            return False
        return wire.stats is None or not wire.stats.draining

    def _is_other_model(self, wire: Wire) -> bool:
        """Whether what the engine serves is not what its name promises. An engine that reconnects is
        compared before it gets a request."""
        if self.identity is None or wire.info is self._compared:
            return bool(self._other)
        self._compared = wire.info
        refusal = self.identity.refusal(self.engine_id, wire.info, self._entry)
        if refusal and refusal != self._other:
            log.error("the engine %s gets no requests: %s", self.engine_id, refusal)
        self._other = refusal
        return bool(refusal)

    @property
    def refusal(self) -> str:
        """Why it gets no requests: it serves something else, or the handshake fails."""
        wire = self._wire
        if wire is None or wire.connected:
            return self._other
        return wire.problem

    def silent(self) -> bool:
        return self._wire is not None and self._wire.connected and self._wire.liveness.silent

    def last_output(self) -> float:
        return self._wire.liveness.output_at if self._wire is not None else 0.0

    async def generate(self, job: Job) -> Generation:
        wire = self._connected()
        if self._is_other_model(wire):
            raise engine_unavailable(self.engine_id, self._other)
        engine_request = job.engine_request
        mailbox = Mailbox(engine_request.request_id, self._abort, reporting(self))
        mailbox.has_begun = wire.has_begun
        translated = partial(self._translated, request=job.request)
        try:
            await wire.submit(engine_request, _Sink(mailbox, translated, self._stray))
        except EngineError as error:
            raise translated(error) from None
        return mailbox

    def startup_progress(self) -> StartupProgress | None:
        if self._wire is None or self._wire.connected or self._wire.problem:
            return None
        away = time.monotonic() - self._away_since
        if away > _EXPECTED_S:
            return None
        left = self._startup_s - away if self._startup_s > away else away
        return StartupProgress(away, min(60.0, max(0.5, left)))

    def adapters(self) -> Mapping[str, AdapterState]:
        return self._wire.adapters if self._wire is not None else {}

    async def load_adapter(self, path: str, digest: str) -> AdapterState:
        try:
            return await self._connected().load_adapter(path)
        except AdapterError as error:
            # A tenant reads this: of the operator's machine it says nothing.
            message = error.message.replace(f"{path}/", "").replace(path, "the adapter")
            raise self._translated(AdapterError(error.code, message)) from None
        except EngineError as error:
            raise self._translated(error) from None

    async def unload_adapter(self, digest: str) -> None:
        try:
            await self._connected().unload_adapter(digest)
        except EngineError as error:
            raise self._translated(error) from None

    async def receipt(self, request_id: str) -> Receipt | None:
        try:
            reply = await self._connected().look_up([request_id], 10.0)
        except EngineError as error:
            raise self._translated(error) from None
        if request_id in reply.under_way:
            raise RequestStillRunning("The request still runs.")
        return next((r for r in reply.receipts if r.request_id == request_id), None)

    async def acknowledge(self, request_ids: list[str]) -> None:
        """An engine that is away keeps its receipts, up to its own limit."""
        if self._wire is None or not self._wire.connected:
            return
        try:
            await self._wire.acknowledge(request_ids)
        except EngineError as error:
            raise self._translated(error) from None

    async def _connect(self, wire: Wire) -> None:
        """Keep connected; log when the engine connects or disconnects."""
        while True:
            try:
                info = await wire.connect(_RETRY_S)
            except ConnectionLost:
                away = time.monotonic() - self._away_since
                log.info("waiting for the engine %s for %.0f s so far", self.engine_id, away)
                continue
            self._startup_s = time.monotonic() - self._away_since
            known = (self.engine_id, self._startup_s, info.model, info.dtype)
            log.info("connected to the engine %s after %.1f s; it serves %s (%s)", *known)
            while wire.connected:
                await asyncio.sleep(_LOOK_S)
            self._away_since = time.monotonic()
            if self.identity is not None:
                self.identity.left(self.engine_id)
                self._compared, self._other = None, ""
            log.warning("the engine %s has disconnected", self.engine_id)

    def _stray(self, receipt: Receipt) -> None:
        if self._on_stray_receipt is not None:
            self._on_stray_receipt(self.engine_id, receipt)

    def _abort(self, request_id: str) -> None:
        if self._wire is not None:
            self._wire.abort_soon(request_id)

    def _connected(self) -> Wire:
        if self._wire is None or not self._wire.connected:
            raise engine_unavailable(self.engine_id, "it is not connected")
        return self._wire

    def _translated(
        self, error: EngineError, request: InferenceRequest | None = None
    ) -> TollhouseError:
        # The engine's checks begin with the name of the field, which stays as it is.
        field = error.message.partition(" is ")[0]
        known = field in InferenceRequest.__struct_fields__
        first = error.message[:1] if known else error.message[:1].upper()
        message = first + error.message[1:].rstrip(".") + "."
        match error.code:
            case "context_length_exceeded":
                return ContextLengthExceeded(
                    message, next_step="Shorten the prompt.", param="messages"
                )
            case "invalid_grammar":
                param = grammar_field(request) if request is not None else None
                return BadRequest(
                    message,
                    next_step=f"Correct {param or 'the schema or grammar'}.",
                    param=param,
                    code="invalid_grammar",
                )
            case "queue_full":
                return Unavailable(
                    message, next_step="Try again shortly.", code="engine_full", retry_after_s=1.0
                )
            case "tenant_queue_full":
                return RateLimited(message, next_step="Try again shortly.", retry_after_s=1.0)
            case "duplicate_request":  # the engine still holds a receipt with this id
                return engine_unavailable(self.engine_id, message)
            case "draining":
                return Unavailable(message, code="engine_draining", retry_after_s=1.0)
        if isinstance(error, ConnectionLost) and error.begun:
            return engine_lost(self.engine_id, error.message.rstrip("."))
        if isinstance(error, ConnectionLost):
            return engine_unavailable(self.engine_id, error.message.rstrip("."))
        if isinstance(error, AdapterError):
            return BadRequest(message, code=error.code, param="model")
        if error.code in ("invalid_config", "integrity", "invalid_checkpoint"):
            return DependencyDown(message)
        return BadRequest(message, code=error.code, param=field if known else None)
