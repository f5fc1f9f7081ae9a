"""The dashboard's access to this gateway: engines, health, limits, adapters and dead letters."""

from collections import Counter
from collections.abc import Mapping, Sequence

from anyio import from_thread

from billing.exports.stores import Store, open_store
from core.counters import Take, Wish
from core.errors import BadRequest, ModelNotFound, TollhouseError
from core.ids import new_id
from core.tenants import adapters
from core.tenants.plans import LimitRule, Scope, Unit
from core.tenants.scope import TenantScope
from dashboards.ports import EngineView, Part, Upload, Used
from gateway.catalog.adapter_files import AdapterFiles
from gateway.catalog.adapter_store import AdapterStore
from gateway.dead_tasks import replay
from gateway.payment_setup import setup_link
from gateway.routing.replicas import Place
from gateway.toolbox import Toolbox
from gateway.wiring import Services

CELERY_PREFIX = "tollhouse"
_STATES = {"ready": "healthy", "drained": "draining", "loading": "loading"}


class Gatehouse:
    def __init__(self, services: Services) -> None:
        self._services = services

    def engines(self) -> Sequence[EngineView]:
        return [_view(each) for each in self._services.router.places()]

    def base_models(self) -> Sequence[str]:
        return self._services.catalog.model_names()

    def residency(self) -> Mapping[str, Mapping[str, int]]:
        found: dict[str, Counter[str]] = {}
        for client in self._services.router.engines():
            for each in list(client.adapters().values()):
                found.setdefault(each.digest, Counter())[each.state] += 1
        return found

    def parts(self) -> Sequence[Part]:
        services = self._services
        found = [_engine_part(each) for each in self.engines()]
        waiting = services.shipper.backlog()
        found.append(Part("spool", "good", f"{waiting} records waiting to be shipped"))
        if services.pipeline.draining:
            found.append(
                Part("gateway", "warn", "draining: running requests finish, new ones are refused")
            )
        else:
            found.append(Part("gateway", "good", "accepting requests"))
        return found

    def used(self, scope: TenantScope, rules: Sequence[LimitRule]) -> Sequence[Used]:
        """Reserves zero to read how full the buckets are. Call it from a worker thread."""
        own = [r for r in rules if r.scope is Scope.TENANT and r.unit is not Unit.CONCURRENT]
        takes = [Take(f"{r.name}:{scope.tenant_id}", r.limit, r.period_s * 1000, 0, 0) for r in own]
        if not takes:
            return []
        wish = Wish(scope.tenant_id, new_id("look"), 0, tuple(takes))
        try:
            answer = from_thread.run(self._services.counters.reserve, wish)
        except TollhouseError:
            return []
        return [
            Used(rule.name, state.capacity - state.remaining, state.capacity, state.reset_ms / 1000)
            for rule, state in zip(own, answer.buckets, strict=True)
        ]

    def add_adapter(self, scope: TenantScope, name: str, base: str, upload: Upload) -> None:
        services = self._services
        adapters.check_name(name)
        known = services.catalog.model_names()
        if base not in known:
            raise ModelNotFound(f"There is no base model {base[:120]!r}.", param="base_model")
        store = AdapterStore(
            services.settings.data_dir / "adapters", services.settings.adapter_dirs
        )
        files = _stored(store, scope.tenant_id, upload)
        with services.database.transaction() as session:
            adapters.register(
                session,
                scope,
                services.clock,
                name=name,
                base_model=base,
                digest=files.digest,
                path=str(files.path),
                rank=files.rank,
                bytes=files.bytes,
            )
        services.adapters.refresh()

    def collects_by(self) -> str:
        payments = self._services.payments
        return payments.name if payments.collects else ""

    def card_page(self, scope: TenantScope) -> str:
        return setup_link(self._services, scope)

    def export_store(self, destination: str) -> Store:
        return open_store(destination, self._services.settings)

    def changed(self) -> None:
        self._services.policies.refresh()
        self._services.adapters.refresh()

    def replay(self, ids: Sequence[int]) -> int:
        services = self._services
        tools = Toolbox(services.settings, services.clock, services.database)
        return replay(tools, ids, CELERY_PREFIX)


def _stored(store: AdapterStore, tenant_id: str, upload: Upload) -> AdapterFiles:
    if upload.archive is not None:
        return store.from_archive(tenant_id, upload.archive)
    if upload.config is not None and upload.weights is not None:
        return store.from_files(tenant_id, upload.config, upload.weights)
    raise BadRequest(
        "The form contains no adapter.",
        next_step="Choose an archive, or both files of a PEFT adapter (config and weights).",
        param="file",
    )


def _view(place: Place) -> EngineView:
    client = place.client
    info, stats = client.info(), client.stats()
    model = info.model if info else ""
    state = _STATES.get(place.state(), "silent")
    if stats is None:
        return EngineView(client.engine_id, model, state)
    if stats.draining:
        state = "draining"
    return EngineView(
        client.engine_id,
        model,
        state,
        stats.running,
        stats.waiting,
        stats.tokens_waiting,
        stats.blocks_total - stats.blocks_free,
        stats.blocks_total,
        Counter(each.state for each in list(client.adapters().values())),
    )


def _engine_part(each: EngineView) -> Part:
    says = f"{each.model or 'no model yet'}, {each.running} running, {each.waiting} waiting"
    if each.state == "healthy":
        return Part(f"engine {each.engine_id}", "good", says)
    state = "warn" if each.state in ("draining", "loading") else "bad"
    return Part(
        f"engine {each.engine_id}",
        state,
        each.state,
        "See the engine's log, or run `tollhouse doctor`.",
    )
