"""Startup work: creates the data directory, migrates the schema, and sets up the demo tenant."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from billing.accounts.accounts import ensure_accounts
from billing.ledger import credits
from billing.usage import partitions
from core.clock import Clock
from core.data_dir import make_data_dir
from core.database import Database
from core.errors import Unauthenticated
from core.ids import ADAPTER, new_id
from core.money import Money, units_of
from core.settings import Settings
from core.tenants import bootstrap, epochs, keys
from core.tenants.models import Adapter
from core.tenants.scope import scope_of_operator
from gateway.catalog.adapter_archive import read_adapter
from gateway.catalog.known_models import shipped_adapters
from gateway.catalog.model_files import model_name, served_names
from gateway.catalog.model_prices import ensure_model_prices
from gateway.catalog.upstreams import read_upstreams
from migrations.run import upgrade

DEMO_CREDIT = Money(units_of("10"), "USD")
_SYSTEM = "system"  # made what a start makes


@dataclass(frozen=True, slots=True)
class StartupInfo:
    """What the ready message shows."""

    embedded: bool
    tenant: str  # the demo tenant's name; empty if there is none
    key: str  # the demo owner's API key
    fresh: bool  # whether this start created the demo tenant
    adapters: tuple[str, ...] = ()  # shipped with the model


def prepare(settings: Settings, database: Database, clock: Clock) -> StartupInfo:
    make_data_dir(settings.data_dir)
    upgrade(database)
    embedded = not settings.database_url
    with database.transaction() as session:
        partitions.ensure_ahead(session, clock.now())
    with database.transaction() as session:
        names = served_names(settings)
        upstreams = read_upstreams(settings.upstreams)
        ensure_model_prices(session, clock, upstreams, model_name(settings), names)
        if not embedded and settings.demo_tenant != "always":
            return StartupInfo(embedded, "", "", False)
        demo_tenant = bootstrap.ensure_demo_tenant(session, clock)
        if demo_tenant.secret is not None:
            ensure_accounts(session, [demo_tenant.tenant_id], clock.now())
            credits.grant(
                session,
                tenant_id=demo_tenant.tenant_id,
                kind="promo",
                money=DEMO_CREDIT,
                reference=f"demo:{demo_tenant.tenant_id}",
                at=clock.now(),
                note="demo credit",
            )
        shipped = shipped_adapters(settings.model) if model_name(settings) in names else {}
        _ensure_adapters(session, clock, demo_tenant.tenant_id, model_name(settings), shipped)
        key = _ensure_demo_key(session, clock, settings.data_dir, demo_tenant)
    return StartupInfo(
        embedded, bootstrap.NAME, key, demo_tenant.secret is not None, tuple(shipped)
    )


def write_secret(file: Path, secret: str) -> None:
    """Write atomically, with mode 0600 from the first byte."""
    temporary = file.with_name(f".{file.name}-{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(secret + "\n")
    temporary.replace(file)


def _ensure_demo_key(
    session: Session, clock: Clock, data_dir: Path, demo_tenant: bootstrap.DemoTenant
) -> str:
    """The key in the `demo-key` file if it is valid; otherwise a new key, saved there."""
    file = data_dir / "demo-key"
    if demo_tenant.secret is not None:
        write_secret(file, demo_tenant.secret)
        return demo_tenant.secret
    with contextlib.suppress(FileNotFoundError, Unauthenticated):
        stored_key = file.read_text().strip()
        keys.find(session, stored_key, clock.now())
        return stored_key
    issued = keys.issue(
        session,
        scope_of_operator(demo_tenant.tenant_id, "system"),
        clock,
        project_id=demo_tenant.project_id,
        name="demo owner",
        role="owner",
    )
    write_secret(file, issued.secret)
    return issued.secret


def _ensure_adapters(
    session: Session, clock: Clock, tenant_id: str, base: str, shipped: dict[str, Path]
) -> None:
    """Register the shipped adapters for the demo tenant, and update any whose files or base changed.
    An adapter that the tenant registered under the same name is left alone."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id)
    demo_tenant_id = {row.name: row for row in session.scalars(query)}
    for name, path in shipped.items():
        files = read_adapter(path)
        row = demo_tenant_id.get(name)
        if row is None:
            row = Adapter(id=new_id(ADAPTER), tenant_id=tenant_id, name=name)
            row.created_at, row.created_by = clock.now(), _SYSTEM
            session.add(row)
        elif row.created_by != _SYSTEM:
            continue
        row.base_model, row.digest, row.path = base, files.digest, str(files.path)
        row.rank, row.bytes = files.rank, files.bytes
    if session.new or session.dirty:
        epochs.advance(session)  # running processes reload the adapters
