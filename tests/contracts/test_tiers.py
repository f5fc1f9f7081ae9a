"""What every tier does alike: memory, disk, Redis and S3."""

import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis

from engine.errors import ConfigError
from engine.tiers import s3_tier
from engine.tiers.disk import DiskTier
from engine.tiers.memory import MemoryTier
from engine.tiers.redis_tier import RedisTier
from engine.tiers.s3_tier import S3Tier
from engine.tiers.tier import Tier, owner_folder
from tests.conftest import REDIS, need_redis
from tests.contracts.redis_keys import forget, new_prefix
from tests.s3_server import Answer, s3_server

KINDS = ["ram", "disk", "remote", "s3"]


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def s3_url(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of a server that speaks S3's protocol."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    bucket = f"tier-{uuid.uuid4().hex}"
    client = boto3.client("s3", endpoint_url=s3_address, region_name="us-east-1")
    client.create_bucket(Bucket=bucket)
    yield f"s3://{bucket}/copies?endpoint={s3_address}"


@pytest.fixture(params=KINDS)
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tier]:
    if request.param == "ram":
        yield MemoryTier(1000, 60.0)
    elif request.param == "disk":
        yield DiskTier(tmp_path / "tier", 1000, 60.0)
    elif request.param == "s3":
        made_in_s3 = S3Tier(request.getfixturevalue("s3_url"), 60.0)
        yield made_in_s3
        made_in_s3.close()
    else:
        need_redis()
        prefix = new_prefix()
        made = RedisTier(REDIS, 60.0, prefix)
        yield made
        made.close()
        forget(prefix)


def name(owner: str, key: str) -> str:
    return f"{owner_folder(owner)}scope/{key}"


def test_reads_give_what_was_written(tier: Tier) -> None:
    names = [name("acme", f"{n:02}") for n in range(20)]
    for number, each in enumerate(names):
        assert tier.write(each, bytes([number]) * 9) == []
    found: list[bytes] = []
    while len(found) < 20 and (more := tier.read(names[len(found) :])):
        found += more
    assert found == [bytes([number]) * 9 for number in range(20)]
    tier.write(names[3], b"new")
    assert tier.read(names[3:4]) == [b"new"]


def test_a_read_ends_at_the_first_miss(tier: Tier) -> None:
    tier.write(name("acme", "a"), b"1")
    tier.write(name("acme", "c"), b"3")
    assert tier.read([name("acme", each) for each in "abc"]) == [b"1"]
    assert tier.read([name("acme", "b")]) == []
    if tier.listed:
        assert [tier.holds(name("acme", each)) for each in "abc"] == [True, False, True]
        assert sorted(tier.names()) == [name("acme", "a"), name("acme", "c")]
    else:
        assert not tier.holds(name("acme", "a")) and tier.names() == []


def test_a_tenant_is_erased_and_no_other(tier: Tier) -> None:
    for owner in ("acme", "globex"):
        for key in "ab":
            tier.write(name(owner, key), owner.encode())
    gone = tier.erase(owner_folder("acme"))
    assert not tier.listed or sorted(gone) == [name("acme", "a"), name("acme", "b")]
    assert tier.read([name("acme", "a")]) == tier.read([name("acme", "b")]) == []
    assert tier.read([name("globex", "a"), name("globex", "b")]) == [b"globex"] * 2
    assert tier.erase(owner_folder("nobody")) == []


def test_a_block_is_discarded(tier: Tier) -> None:
    tier.write(name("acme", "a"), b"1")
    tier.discard(name("acme", "a"))
    tier.discard(name("acme", "never"))
    assert tier.read([name("acme", "a")]) == []


def test_threads_may_use_it_together(tier: Tier) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        own = name(f"t{number}", "k")
        for turn in range(20):
            tier.write(own, b"%d %d" % (number, turn))
            if tier.read([own]) != [b"%d %d" % (number, turn)]:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Now:
    def __init__(self) -> None:
        self.at = 1e9

    def __call__(self) -> float:
        return self.at


@pytest.mark.parametrize("kind", ["ram", "disk"])
def test_the_least_recently_used_goes_first_and_the_old_go(kind: str, tmp_path: Path) -> None:
    now = Now()

    def make() -> Tier:
        if kind == "ram":
            return MemoryTier(30, 100.0, now)
        return DiskTier(tmp_path, 30, 100.0, now)

    tier = make()
    for key in "abc":
        tier.write(name("acme", key), b"x" * 10)
        now.at += 1
    tier.read([name("acme", "a")])
    assert tier.write(name("acme", "d"), b"x" * 10) == [name("acme", "b")]
    assert tier.write(name("acme", "huge"), b"x" * 31) == []
    assert sorted(tier.names()) == [name("acme", each) for each in "acd"]
    now.at += 99.5
    assert tier.read([name("acme", "c")]) == []  # written before the others were used
    assert tier.read([name("acme", "d")]) == [b"x" * 10]
    if kind == "disk":
        assert len([path for path in tmp_path.rglob("*") if path.is_file()]) <= 3


def test_redis_forgets_after_its_time() -> None:
    need_redis()
    prefix = new_prefix()
    tier = RedisTier(REDIS, 0.2, prefix)
    tier.write(name("acme", "a"), b"1")
    left = redis.Redis.from_url(REDIS).pttl(prefix + name("acme", "a"))
    assert 0 < left <= 200
    tier.close()
    forget(prefix)


def test_s3_forgets_after_its_time(s3_url: str) -> None:
    fresh, late = S3Tier(s3_url, 60.0), S3Tier(s3_url, 0.0)
    fresh.write(name("acme", "a"), b"1")
    assert fresh.read([name("acme", "a")]) == [b"1"]
    assert late.read([name("acme", "a")]) == []
    assert fresh.read([name("acme", "a")]) == [], "it was removed"


class Waiting:
    """A store in front of which each read of an object waits, and how many wait together."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reads: list[int] = []  # at the begin of each, how many were under way
        self._now = 0
        self._lock = threading.Lock()

    def __call__(self, answer: Answer) -> Answer:
        def waited(environ: dict[str, Any], begin: Any) -> Iterable[bytes]:
            if environ["REQUEST_METHOD"] != "GET":
                return answer(environ, begin)
            with self._lock:
                self._now += 1
                self.reads.append(self._now)
            time.sleep(self.seconds)
            with self._lock:
                self._now -= 1
            return answer(environ, begin)

        return waited


def read_all(tier: Tier, names: list[str]) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < len(names) and (more := tier.read(names[len(found) :])):
        found += more
    return found


def test_s3_reads_a_chain_in_few_round_trips(monkeypatch: pytest.MonkeyPatch) -> None:
    """63 blocks of a store that answers after 0.2 s: one by one they take 12.6 s."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    waiting = Waiting(0.0)
    with s3_server(waiting) as address:
        client = boto3.client("s3", endpoint_url=address, region_name="us-east-1")
        client.create_bucket(Bucket="slow")
        tier = S3Tier(f"s3://slow/copies?endpoint={address}", 60.0)
        names = [name("acme", f"{n:02}") for n in range(64)]
        for number, each in enumerate(names[:63]):
            tier.write(each, bytes([number]) * 9)
        waiting.seconds = 0.2
        began = time.monotonic()
        assert read_all(tier, names[:63]) == [bytes([number]) * 9 for number in range(63)]
        took = time.monotonic() - began
        assert len(waiting.reads) == 63 and max(waiting.reads) <= 16
        assert took < 16 * 0.2, "6 round trips of a first block, 16, 15, a first block, 16 and 14"
        waiting.reads.clear()
        assert tier.read([name("globex", f"{n:02}") for n in range(63)]) == []
        assert waiting.reads == [1], "a prompt without copies asks once"
        tier.close()


def test_s3_erases_more_than_a_page_and_leaves_other_prefixes(
    s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_tier, "_AT_ONCE", 3)
    one, other = S3Tier(s3_url, 60.0), S3Tier(s3_url.replace("/copies", "/others"), 60.0)
    for key in "abcdefgh":
        one.write(name("acme", key), b"1")
        other.write(name("acme", key), b"2")
    one.erase(owner_folder("acme"))
    assert all(one.read([name("acme", key)]) == [] for key in "abcdefgh")
    assert all(other.read([name("acme", key)]) == [b"2"] for key in "abcdefgh")


def test_a_disk_is_found_again_without_parts_of_files(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000, 60.0)
    tier.write(name("acme", "a"), b"1")
    part = tmp_path / (name("acme", "b") + ".part")
    part.write_bytes(b"cut")
    os.utime(tmp_path / name("acme", "a"))
    again = DiskTier(tmp_path, 1000, 60.0)
    assert again.names() == [name("acme", "a")]
    assert again.read([name("acme", "a")]) == [b"1"] and not part.exists()
    (tmp_path / name("acme", "a")).unlink()
    assert again.read([name("acme", "a")]) == [] and again.names() == []
    assert (tmp_path / name("acme", "a")).parent.stat().st_mode & 0o77 == 0


def test_a_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"tier_disk .*file.*: name another folder"):
        DiskTier(tmp_path / "file" / "x", 1000, 60.0)
    with pytest.raises(ConfigError, match="tier_remote is 'nonsense'"):
        RedisTier("nonsense", 60.0)
    for wrong in ("s3://", "s3:///prefix", "s3://bucket/a?region=x"):
        with pytest.raises(ConfigError, match=r"tier_remote is 's3:.*use s3://bucket/prefix"):
            S3Tier(wrong, 60.0)
