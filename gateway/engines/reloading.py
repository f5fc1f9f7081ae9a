"""Reads the file of TOLLHOUSE_UPSTREAMS again and serves by it, while requests run.

The operator's reload is an entry of the audit log with the digest of the new list. Every gateway
process sees it within a second, reads its own copy of the file, and serves by it once it is that list.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from core.clock import Clock
from core.database import Database
from core.errors import Conflict, SettingError
from core.settings import Settings
from core.tenants import audit
from core.tenants.key_cache import KeyCache
from core.tenants.models import AuditEntry
from gateway.catalog.catalog import Catalog, ServedModel
from gateway.catalog.model_files import model_name
from gateway.catalog.model_prices import ensure_model_prices
from gateway.catalog.upstreams import Upstream, read_upstreams
from gateway.edge.refresh import POLL_S
from gateway.edge.threads import Work, run_as
from gateway.engines.clients import Engines, Kept
from gateway.engines.routing.replicas import Replica
from gateway.engines.routing.router import Router
from gateway.engines.upstream_changes import (
    UpstreamChange,
    canary_shares,
    changes_between,
    digest_of,
    same_connection,
)
from gateway.request.engine import EngineClient

log = logging.getLogger("tollhouse.upstream")
_ACTION, _TARGET = "upstreams.reload", "TOLLHOUSE_UPSTREAMS"
_CONNECT_S = 5.0  # that new engines have before requests are sent to them
_RETRY_S = 5.0  # between looks at a copy of the file that is not yet the reloaded one
_AFTER_LAST_S = 1.0  # its receipt is acknowledged 0.2 s after a request has ended

Build = Callable[[list[Upstream], Kept], Engines]


@dataclass(frozen=True, slots=True)
class ReloadPreview:
    file: str
    digest: str
    changes: Sequence[UpstreamChange]
    models: Sequence[str]  # that will be served

    def described(self) -> dict[str, object]:
        return {
            "object": "upstreams",
            "file": self.file,
            "digest": self.digest,
            "models": list(self.models),
            "changes": [each.described() for each in self.changes],
        }


@dataclass(frozen=True, slots=True)
class _Read:
    upstreams: list[Upstream]
    engines: Engines

    @property
    def digest(self) -> str:
        return digest_of(self.upstreams)


class UpstreamReload:
    def __init__(
        self,
        settings: Settings,
        database: Database,
        clock: Clock,
        router: Router,
        catalog: Catalog,
        *,
        build: Build,
        upstreams: list[Upstream],
    ) -> None:
        """`upstreams` are those in force; `build` makes clients that are not started yet."""
        self._settings, self._database, self._clock = settings, database, clock
        self._router, self._catalog, self._build = router, catalog, build
        self._upstreams = upstreams
        self._own = model_name(settings)
        self._file = settings.upstreams.strip()
        self._lock = asyncio.Lock()
        self._seen = 0  # the last reload that this process serves by
        self._closing: set[asyncio.Task[None]] = set()

    def preview(self) -> ReloadPreview:
        """Reads and checks the file, and builds its clients. Conflict if it cannot be served by."""
        return self._preview_of(self._read())

    def regions(self) -> dict[str, str]:
        """By engine, where the entry names one."""
        return {each.replica_name: each.region for each in self._upstreams if each.region}

    async def reload(self, actor: str, digest: str) -> ReloadPreview:
        """Serve by the file, if it still is the list with this digest, and have all processes do so."""
        async with self._lock:
            read = await run_as(Work.OWN, self._read)
            preview = self._preview_of(read)
            if digest != read.digest:
                raise Conflict(
                    f"{self._file} has changed since it was shown.", next_step="Look at it again."
                )
            if preview.changes:
                self._seen = await run_as(Work.OWN, self._record, actor, read, preview)
                await self._apply(read)
            return preview

    async def run(self, key_cache: KeyCache) -> None:
        """Follow the reloads of other processes, until cancelled."""
        self._seen = max(self._seen, (await run_as(Work.OWN, self._last))[0])
        epoch, wanted, pause = key_cache.epoch, "", POLL_S
        while True:
            await asyncio.sleep(pause)
            pause = POLL_S
            if key_cache.epoch == epoch and not wanted:
                continue
            epoch = key_cache.epoch
            try:
                wanted = await self._follow()
            except Exception as error:
                wanted = "again"
                log.warning("cannot serve by the reloaded upstreams yet: %s", error)
            if wanted:
                pause = _RETRY_S

    async def close(self) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def _follow(self) -> str:
        """The digest of the list that is still to come; empty if this process has the last one."""
        number, digest = await run_as(Work.OWN, self._last)
        if number <= self._seen:
            return ""
        async with self._lock:
            read = await run_as(Work.OWN, self._read)
            if read.digest != digest:
                log.warning("%s is not the reloaded list %s yet", self._file, digest)
                return digest
            await self._apply(read)
            self._seen = max(self._seen, number)
        return ""

    def _read(self) -> _Read:
        if not self._file or not Path(self._file).is_file():
            raise Conflict(
                "The upstreams are not in a file, so a running gateway cannot read them again.",
                next_step="Write them into a JSON file, name it in TOLLHOUSE_UPSTREAMS and restart once.",
            )
        try:
            upstreams = read_upstreams(self._file)
            if not upstreams:
                raise SettingError("The list names no engine.", next_step="Name one at least.")
            return _Read(upstreams, self._build(upstreams, self._kept(upstreams)))
        except SettingError as error:
            raise Conflict(error.message, next_step=error.next_step) from None
        except (OSError, UnicodeDecodeError) as error:
            raise Conflict(f"{self._file} cannot be read: {error}.") from None

    def _kept(self, upstreams: Sequence[Upstream]) -> Kept:
        """Clients whose entry stays as it is. With a second replica of its model, an engine is asked for
        its cache events, which takes a new connection."""
        before = {each.replica_name: each for each in self._upstreams}
        clients = {each.engine_id: each for each in self._router.in_use()}
        several = self._with_several(upstreams) == self._with_several(self._upstreams)
        kept: dict[str, EngineClient] = {}
        for each in upstreams:
            old = before.get(each.replica_name)
            if old is None or not same_connection(old, each) or each.replica_name not in clients:
                continue
            if each.is_http or several:
                kept[each.replica_name] = clients[each.replica_name]
        return Kept(kept, self._kept_models(upstreams))

    def _with_several(self, upstreams: Sequence[Upstream]) -> set[str]:
        names = [each.model or self._own for each in upstreams]
        return {name for name in names if names.count(name) > 1}

    def _kept_models(self, upstreams: Sequence[Upstream]) -> Mapping[str, ServedModel]:
        """Models whose every entry stays, with the context length that they have learned."""
        changed = {each.model for each in changes_between(self._upstreams, upstreams, self._own)}
        known = {each.model or self._own for each in self._upstreams} - changed
        found = {name: self._catalog.served(name) for name in known}
        return {name: model for name, model in found.items() if model is not None}

    def _preview_of(self, read: _Read) -> ReloadPreview:
        changes = changes_between(self._upstreams, read.upstreams, self._own)
        return ReloadPreview(self._file, read.digest, changes, list(read.engines.clients))

    async def _apply(self, read: _Read) -> None:
        known = {id(client) for client in self._router.in_use()}
        wanted = {id(each): each for own in read.engines.clients.values() for each in own}
        new = [each for key, each in wanted.items() if key not in known]
        for client in new:
            await client.start()
        await _connected(new)
        self._router.canaries = canary_shares(read.upstreams)
        self._catalog.serve_only(read.engines.models)
        retired = self._router.serve_by(read.engines.clients)
        for change in changes_between(self._upstreams, read.upstreams, self._own):
            log.warning("upstream %s of %s is %s", change.upstream, change.model, _said(change))
        self._upstreams = read.upstreams
        for replica in retired:
            task = asyncio.create_task(self._close_when_idle(replica))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def _close_when_idle(self, replica: Replica) -> None:
        until = self._clock.monotonic() + self._settings.request_timeout_s
        while replica.under_way and self._clock.monotonic() < until:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(_AFTER_LAST_S)
        await replica.client.close()
        self._router.forget(replica)
        log.info("%s is no longer connected", replica.name)

    def _record(self, actor: str, read: _Read, preview: ReloadPreview) -> int:
        after = {"digest": read.digest, "changes": [each.described() for each in preview.changes]}
        with self._database.transaction() as session:
            ensure_model_prices(
                session, self._clock, read.upstreams, self._own, read.engines.clients
            )
            audit.record_operator(
                session, self._clock, actor, _ACTION, _TARGET, before=None, after=after
            )
            return _last_reload(session)[0]

    def _last(self) -> tuple[int, str]:
        with self._database.read() as session:
            return _last_reload(session)


def _last_reload(session: Session) -> tuple[int, str]:
    """(number, digest); (0, "") before the first."""
    query = (
        select(AuditEntry.id, AuditEntry.after)
        .where(AuditEntry.tenant_id.is_(None), AuditEntry.action == _ACTION)
        .order_by(AuditEntry.id.desc())
    )
    row = session.execute(query.limit(1)).first()
    return (row[0], str((row[1] or {}).get("digest", ""))) if row else (0, "")


def _said(change: UpstreamChange) -> str:
    return f"{change.change}: {', '.join(change.fields)}" if change.fields else change.change


async def _connected(clients: Sequence[EngineClient]) -> None:
    """Give engines the time to connect; one that is away is served by when it comes."""
    for _ in range(int(_CONNECT_S / POLL_S)):
        if all(client.healthy() for client in clients):
            return
        await asyncio.sleep(POLL_S)
