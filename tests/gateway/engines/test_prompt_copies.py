"""Local engines keep copies of cached prompts by settings, and a tenant's copies can be erased."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest

from core.errors import SettingError
from core.settings import Settings
from engine.worker.options import parse
from gateway.admin.tenants.command import erase_copies
from gateway.engines.local_engines import tier_options
from tests.conftest import REDIS, need_redis
from tests.engine.helpers import ask, make_config
from tests.engine.tiers.test_transfers import PROMPT, Engine, FakeRunner, run
from tests.s3_server import s3_server


@pytest.fixture
def s3_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with s3_server() as address:
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
        client.create_bucket(Bucket="copies-of-prompts")
        yield f"s3://copies-of-prompts/kv?endpoint={address}"


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


def test_two_remote_stores_are_refused_by_name(tmp_path: Path) -> None:
    both = settings_of(tmp_path, kv_tier_redis_url=REDIS, kv_tier_s3_url="s3://bucket/copies")
    with pytest.raises(SettingError, match="S3_URL and TOLLHOUSE_KV_TIER_REDIS_URL are both set"):
        tier_options(both, 0)
    assert not list(tmp_path.iterdir()), "no key is made for them"


@pytest.mark.parametrize("place", ["disk", "Redis", "S3"])
def test_a_tenants_copies_are_erased_and_no_others(
    tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    changes: dict[str, object] = {"kv_tier_disk_mb": 4, "kv_tier_ram_mb": 1}
    if place == "Redis":
        need_redis()
        changes = {"kv_tier_redis_url": REDIS}
    if place == "S3":
        changes = {"kv_tier_s3_url": request.getfixturevalue("s3_url")}
    settings = settings_of(tmp_path, **changes)
    first = engine_of(settings)
    tenants = [f"{tmp_path}-{name}" for name in ("acme", "globex")]
    run(first, *(ask(name, PROMPT, 4, namespace=name) for name in tenants))
    first.close()
    assert (tmp_path / "kv-tier.key").stat().st_mode & 0o77 == 0
    places = erase_copies(settings, tenants[0])["places"]
    assert places == ([str(tmp_path / "kv-tier" / "engine-0")] if place == "disk" else [place])
    again = engine_of(settings)
    receipts = run(again, *(ask(name, PROMPT, 4, namespace=name) for name in tenants)).receipts
    assert [receipts[name].cached for name in tenants] == [0, 60]
    again.close()
    for name in tenants:
        erase_copies(settings, name)
