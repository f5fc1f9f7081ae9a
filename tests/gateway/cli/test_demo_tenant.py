"""Production mints no tenant and no key that nobody asked for; embedded mode has its demo tenant."""

from pathlib import Path
from typing import Literal

import pytest
from sqlalchemy import func, select

from core.clock import SystemClock
from core.database import Database
from core.settings import Settings
from core.tenants.models import ApiKey, Tenant
from gateway.cli.serve.startup import StartupInfo, prepare


def started(settings: Settings) -> tuple[StartupInfo, list[str], int]:
    """What the second start says, the tenants, and the number of keys."""
    database = Database(settings.effective_database_url)
    try:
        for _ in range(2):
            info = prepare(settings, database, SystemClock())
        with database.read() as session:
            keys = session.scalar(select(func.count()).select_from(ApiKey)) or 0
            return info, list(session.scalars(select(Tenant.name))), keys
    finally:
        database.close()


def test_production_makes_no_demo_tenant(tmp_path: Path, database_url: str) -> None:
    info, tenants, keys = started(Settings(data_dir=tmp_path, database_url=database_url))
    assert (tenants, keys, info.key, info.tenant) == ([], 0, "", "")
    assert not (tmp_path / "demo-key").exists()


def test_a_key_of_an_earlier_demo_tenant_is_not_made_again(tmp_path: Path, sqlite_url: str) -> None:
    always = Settings(data_dir=tmp_path / "a", database_url=sqlite_url, demo_tenant="always")
    assert started(always)[1:] == (["demo"], 1)
    other = Settings(data_dir=tmp_path / "b", database_url=sqlite_url)
    info, tenants, keys = started(other)
    assert (tenants, keys, info.key) == (["demo"], 1, "")


@pytest.mark.parametrize("demo_tenant", ["embedded", "always"])
def test_embedded_mode_has_one_with_an_owners_key(
    tmp_path: Path, demo_tenant: Literal["embedded", "always"]
) -> None:
    info, tenants, keys = started(Settings(data_dir=tmp_path, demo_tenant=demo_tenant))
    assert (tenants, keys, info.tenant) == (["demo"], 1, "demo")
    assert (tmp_path / "demo-key").read_text().strip() == info.key
