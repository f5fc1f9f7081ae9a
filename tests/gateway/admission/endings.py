"""Requests that end in every way, run through the pipeline in one event loop, without a server."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from billing.notices import budgets
from billing.pricing.prices import PriceDraft, save
from billing.rating.unrated import UnratedUsage
from core.clock import FakeClock
from core.counters import BucketRequest, Cap, Denial, Hold, Take
from core.errors import RateLimited, Unavailable
from core.events import UsageEvent
from core.money import Money
from core.settings import Settings
from core.tenants import keys, limits
from core.tenants.keys import Principal
from core.tenants.organisations import create_project, create_tenant
from core.tenants.plans import DAY, LimitRule, Scope, Unit
from core.tenants.scope import scope_of_operator
from engine.demo.paths import MODEL_DIR
from engine.protocol import FinishReason, GenerateRequest, Receipt, TokenChunk
from gateway.catalog.catalog import ServedModel
from gateway.catalog.codec.tokenizing import load_codec
from gateway.catalog.upstreams import Upstream
from gateway.engines.clients import Engines
from gateway.engines.fake import FakeEngine
from gateway.engines.openai import OpenAIEngine
from gateway.formats.registry import inference_surfaces
from gateway.metering.spool import read_outbox
from gateway.metering.spool_records import decode_outbox
from gateway.request.engine import Generation, Job, Mailbox
from gateway.request.exchange import Exchange, Headers
from gateway.request.inference import InferenceRequest
from gateway.request.output_guard import OutputGuard
from gateway.screening.moderator import Continued, PromptBlocked, ScreeningResult
from gateway.serving.services import Services
from gateway.wiring import build
from tests.migrated import migrated

FIRST, SECOND = "first", "second"
BIG = 10**9
CAP = 10**15  # picounits
# Picounits a token and a request: 10 USD a million input tokens, 5 cached, 30 output.
INPUT, CACHED, OUTPUT, FEE = 10_000_000, 5_000_000, 30_000_000, 2_000_000_000
TERMS = {"input": "10", "cached_input": "5", "output": "30", "request": "0.002"}


class Ending(Exchange):
    """A request of one tenant with a scripted end; `leave` is the client that goes away."""

    def __init__(self, principal: Principal, body: dict[str, Any], timeout_ms: int) -> None:
        headers = [(b"x-request-timeout-ms", str(timeout_ms).encode())]
        super().__init__({"headers": headers}, None, None)
        self.principal = principal
        self.status = 0
        self._body = orjson.dumps(body)
        self._gone: Callable[[], None] | None = None

    async def body(self, limit: int) -> bytes:
        return self._body

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        self._gone = callback

    def leave(self) -> None:
        self.disconnected = True
        if self._gone is not None:
            self._gone()

    def done(self) -> None:
        self._gone = None

    async def start(self, status: int, headers: Headers) -> None:
        self.started, self.status = True, status

    async def write(self, data: bytes, *, more: bool = True) -> None:
        return


class ScriptedEngine(FakeEngine):
    """Ends each request as `script_of` its model says: after so many tokens, in some way."""

    how = "ok"
    tokens = 3
    exchange: Ending

    async def generate(self, job: Job) -> Generation:
        if self.how == "busy":
            raise RateLimited("The upstream is busy.", code="upstream_busy", retry_after_s=1.0)
        if self.how == "down":
            raise Unavailable("The upstream answered 500.", code="engine_unavailable")
        return await super().generate(job)

    async def _run(self, engine_request: GenerateRequest, mailbox: Mailbox) -> None:
        id, sent = engine_request.request_id, 0
        for index in range(self.tokens):
            token = engine_request.prompt[index % len(engine_request.prompt)]
            last = FinishReason.LENGTH if self.how == "ok" and index == self.tokens - 1 else None
            mailbox.put(TokenChunk(id, 0, [token], None, last))
            sent += 1
            await asyncio.sleep(0)
        reason = FinishReason.LENGTH
        if self.how in ("gone", "slow"):
            if self.how == "gone":
                self.exchange.leave()
            while id not in self._aborted:
                await asyncio.sleep(0.001)
            reason = FinishReason.ABORT
        self._running.pop(id, None)
        if self.how == "lost":
            mailbox.fail(Unavailable("The connection was lost.", code="engine_unavailable"))
            return
        if self.how == "error":
            reason = FinishReason.ERROR
        prompt, cached = len(engine_request.prompt), self._cached(engine_request)
        counts = {"prompt": prompt, "cached": cached, "computed": prompt - cached}
        counts |= {"unprocessed": 0, "generated": sent, "delivered": sent, "recomputed": 0}
        mailbox.finish(
            Receipt(
                request_id=id,
                namespace=engine_request.namespace,
                adapter=None,
                discarded=0,
                finish_reason=reason,
                queue_s=0.0,
                prefill_s=0.0,
                decode_s=0.0,
                **counts,
            )
        )


class BlockingGuard:
    needs_second_opinion = undecided = False
    spare = 0
    held, needed = 0, 1

    def __init__(self, paid_by: str) -> None:
        self.blocked = False
        self.action: str | None = None
        self.cut_paid_by = paid_by
        self._passed = 0

    def feed(self, text: str, *, last: bool = False) -> str:
        self._passed += 1
        self.blocked = self._passed > 1  # after the first piece
        self.action = "block" if self.blocked else None
        return "" if self.blocked else text

    def flush(self) -> str:
        return ""

    async def decide(self) -> str:
        return ""

    def over(self) -> None:
        return


class ScriptedModerator:
    block = ""  # prompt or answer
    paid_by = "tenant"

    async def screen(
        self, request_id: str, principal: Principal, request: InferenceRequest
    ) -> ScreeningResult:
        if self.block == "prompt":
            raise PromptBlocked("Blocked.", paid_by=self.paid_by, next_step="", param="messages")
        return ScreeningResult(request)

    def guard(
        self, request_id: str, principal: Principal, choices: int, before: Continued | None = None
    ) -> Sequence[OutputGuard]:
        if self.block == "answer":
            return [BlockingGuard(self.paid_by) for _ in range(choices)]
        return ()

    def close(self) -> None:
        return


@dataclass(frozen=True)
class Way:
    """One way in which a request ends."""

    engine: str = "ok"  # ok, gone, slow, error, lost, busy, down
    tokens: int = 3  # that the engine sends before the end
    stream: bool = False
    block: str = ""
    paid_by: str = "tenant"
    bad: bool = False  # refused for its parameters
    fallback: bool = False  # to a second model that answers
    prompt: str = "hello"


def count_by(codec: Any) -> Callable[[str], int]:
    return lambda text: len(codec.encode(text))


class Gateway:
    """A gateway process with two models and one tenant that has limits and a budget."""

    def __init__(self, directory: Path, upstreams: Sequence[Upstream] = ()) -> None:
        """`upstreams` are models of their own beside the two scripted ones."""
        self.refused = 0  # requests that were wrong in themselves, so that no event is of them
        self.clock = FakeClock()  # it stands still, so no bucket refills
        settings = Settings(data_dir=directory, fallbacks=f"{FIRST}={SECOND}")
        self.database = migrated(settings.effective_database_url)
        self._make_tenant((FIRST, SECOND, *(each.model for each in upstreams)))
        codec = load_codec(MODEL_DIR)
        self.engines = {name: self._engine(name, codec) for name in (FIRST, SECOND)}
        self.upstreams = [
            OpenAIEngine(each, each.model, None, count_by(codec) if each.tokenizer else None)
            for each in upstreams
        ]
        served = [ServedModel(name, codec, 512, 0) for name in self.engines]
        for each in upstreams:
            can = frozenset(each.capabilities)
            known = codec if each.tokenizer else None
            served.append(ServedModel(each.model, known, 8192, 0, capabilities=can))
        clients: dict[str, list[Any]] = {name: [engine] for name, engine in self.engines.items()}
        clients |= {u.model: [e] for u, e in zip(upstreams, self.upstreams, strict=True)}
        self.moderator = ScriptedModerator()
        self.services: Services = build(
            settings,
            clock=self.clock,
            moderator=self.moderator,
            engines=Engines(clients, served),
        )
        self.services.prices.refresh()
        self.services.limiter.seeding = None  # nothing runs here that ships usage to be seeded from
        self.surface = next(s for s in inference_surfaces() if "chat" in s.route)

    def _engine(self, name: str, codec: Any) -> ScriptedEngine:
        return ScriptedEngine(
            engine_id=name, vocab_size=codec.vocab_size, eos_token_ids=codec.eos_token_ids
        )

    def _make_tenant(self, models: Sequence[str]) -> None:
        rules = [
            LimitRule(Scope.TENANT, unit, BIG, DAY) for unit in Unit if unit is not Unit.CONCURRENT
        ]
        with self.database.transaction() as session:
            tenant = create_tenant(session, self.clock, name="t", plan="premium")
            scope = scope_of_operator(tenant.id)
            project = create_project(session, scope, self.clock, name="default").id
            for rule in rules:
                limits.set_rule(session, scope, self.clock, rule)
            secret = keys.issue(session, scope, self.clock, project_id=project, name="k").secret
            budgets.create(
                session,
                self.clock,
                tenant_id=tenant.id,
                scope="tenant",
                scope_id=tenant.id,
                cap=Money(CAP),
            )
            for model in models:
                save(session, self.clock, PriceDraft(model, TERMS, self.clock.now(), note="n"))
            self.principal = keys.find(session, secret, self.clock.now())

    async def run(self, way: Way) -> int:
        """The HTTP status of a request that ends this way."""
        body = {
            "model": FIRST if way.fallback else SECOND,
            "max_tokens": -1 if way.bad else max(1, way.tokens),
            "stream": way.stream,
            "messages": [{"role": "user", "content": way.prompt}],
        }
        exchange = Ending(self.principal, body, 40 if way.engine == "slow" else 20_000)
        self.engines[FIRST].how = "down"
        last = self.engines[SECOND]
        last.how, last.tokens, last.exchange = way.engine, way.tokens, exchange
        self.moderator.block, self.moderator.paid_by = way.block, way.paid_by
        for replica in self.services.router.replicas():
            replica.answered(self.principal.tenant_id)
        await self.services.pipeline.serve(self.surface, exchange)
        self.refused += way.bad
        return exchange.status

    def events(self) -> list[UsageEvent]:
        self.services.spool.flush()
        return decode_outbox(read_outbox(self.services.spool.file.connection, 100_000)).usage

    async def kept(self) -> dict[str, int]:
        """What the tenant's buckets hold, by unit, and its money in nano-units: spent and held."""
        group, counters = self.principal.tenant_id, self.services.counters
        named = {f"tenant:{unit}:{DAY}:{group}": str(unit) for unit in Unit}
        del named[f"tenant:{Unit.CONCURRENT}:{DAY}:{group}"]
        takes = tuple(Take(key, BIG, DAY * 1000, 0, 0) for key in named)
        granted = await counters.reserve(BucketRequest(group, "look", 0, takes))
        found = {named[state.key]: BIG - state.remaining for state in granted.buckets}
        owner = (group, self.principal.project_id, self.principal.key_id)
        with self.database.read() as session:
            reader = budgets.LimitReader(session, self.clock.now(), UnratedUsage())
            (limit,) = reader.of_key(*owner)
        caps = (Cap(limit.key, CAP // 1000, 0),)
        denied = await counters.reserve(BucketRequest(group, "money", 1, hold=Hold(CAP, CAP, caps)))
        assert isinstance(denied, Denial)
        return found | {"money": CAP // 1000 - denied.affordable}

    async def held(self) -> tuple[int, int]:
        """The money that the budget holds, and the sum of its reservations, in nano-units."""
        with self.database.read() as session:
            ((tenant_id, keys),) = budgets.hard_limit_keys(session, self.clock.now()).items()
        (found,) = await self.services.counters.holds(tenant_id, keys)
        return found.held, found.reserved

    def close(self) -> None:
        self.services.spool.file.close()
        self.services.recovery.close()
        self.database.close()
