"""Local engines keep copies of cached prompts by settings, and a tenant's copies can be erased."""

from dataclasses import replace
from pathlib import Path

import pytest

from core.settings import Settings
from engine.worker.options import parse
from gateway.cli.commands._copies import erase_copies
from gateway.upstreams.local_engines import tier_options
from tests.conftest import REDIS, need_redis
from tests.engine.helpers import ask, make_config
from tests.engine.tiers.test_transfers import PROMPT, Engine, FakeRunner, run


def settings_of(folder: Path, **changes: object) -> Settings:
    return Settings(data_dir=folder, _env_file=None, **changes)  # type: ignore[arg-type, call-arg]


def engine_of(settings: Settings) -> Engine:
    found = parse(["--model", "fake", *tier_options(settings, 0)]).config
    tiers = {name: getattr(found, name) for name in found.__slots__ if name.startswith("tier_")}
    config = replace(make_config(), **tiers | {"tier_wait_s": 20.0})
    return Engine(config, FakeRunner(config))


def test_nothing_is_kept_by_default(tmp_path: Path) -> None:
    assert tier_options(settings_of(tmp_path), 0) == ()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("remote", [False, True])
def test_a_tenants_copies_are_erased_and_no_others(tmp_path: Path, remote: bool) -> None:
    changes: dict[str, object] = {"kv_tier_disk_mb": 4, "kv_tier_ram_mb": 1}
    if remote:
        need_redis()
        changes = {"kv_tier_redis_url": REDIS}
    settings = settings_of(tmp_path, **changes)
    first = engine_of(settings)
    tenants = [f"{tmp_path}-{name}" for name in ("acme", "globex")]
    run(first, *(ask(name, PROMPT, 4, namespace=name) for name in tenants))
    first.close()
    assert (tmp_path / "kv-tier.key").stat().st_mode & 0o77 == 0
    places = erase_copies(settings, tenants[0])["places"]
    assert places == (["Redis"] if remote else [str(tmp_path / "kv-tier" / "engine-0")])
    again = engine_of(settings)
    receipts = run(again, *(ask(name, PROMPT, 4, namespace=name) for name in tenants)).receipts
    assert [receipts[name].cached for name in tenants] == [0, 60]
    again.close()
    for name in tenants:
        erase_copies(settings, name)
