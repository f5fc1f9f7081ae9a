"""The counters on a real Redis Cluster of three nodes: every call lies in one slot, all slots count."""

import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from redis.crc import key_slot

from core.counters import BucketGrant, BucketRequest, Cap, Denial, Hold, Slot, Take
from core.counters_redis import RedisCounters
from core.errors import SettingError

NODES = 3
SLOTS = 16_384


def free_ports() -> list[int]:
    """Below 55536: a node's bus listens 10,000 above its port."""
    found: list[int] = []
    for port in range(21_000 + time.monotonic_ns() % 20_000, 55_000):
        with socket.socket() as a, socket.socket() as b:
            try:
                a.bind(("127.0.0.1", port))
                b.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            found.append(port)
        if len(found) == NODES:
            break
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server on the path; install redis to run this test")
    ports = free_ports()
    processes = [start(port, tmp_path_factory.mktemp("node")) for port in ports]
    try:
        nodes = [redis.Redis(port=port) for port in ports]
        for number, node in enumerate(nodes):
            wait(node.ping)
            first, last = number * SLOTS // NODES, (number + 1) * SLOTS // NODES - 1
            node.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in ports[1:]:
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port)
        for node in nodes:
            wait(lambda node=node: b"cluster_state:ok" in node.execute_command("CLUSTER", "INFO"))
            node.close()
        yield f"redis+cluster://127.0.0.1:{ports[0]}"
    finally:
        for process in processes:
            process.kill()
            process.wait(10)


def start(port: int, directory: Path) -> "subprocess.Popen[bytes]":
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    command += [
        "--cluster-enabled",
        "yes",
        "--dir",
        str(directory),
        "--cluster-node-timeout",
        "500",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait(what: object, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if what():  # type: ignore[operator]
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "the cluster did not come up"
        time.sleep(0.02)


@pytest.fixture
async def counters(cluster: str) -> AsyncIterator[RedisCounters]:
    made = RedisCounters(cluster, timeout_s=5)
    await made.start()
    yield made
    await made.close()


def bucket_request(group: str, id: str) -> BucketRequest:
    return BucketRequest(
        group,
        id,
        30_000,
        (Take("key:requests", 2, 60_000, 1, 1), Take("org:tokens", 1000, 60_000, 5, 5)),
        (Slot("org:concurrent", 9),),
        Hold(10, 10, (Cap("org:day", 100, 0), Cap("project:month", 100, 0))),
    )


async def test_tenants_on_every_node_are_counted_exactly(counters: RedisCounters) -> None:
    tenants = [f"org_{number}" for number in range(12)]
    nodes = {key_slot(f"{{tollhouse:{each}}}".encode()) * NODES // SLOTS for each in tenants}
    assert nodes == set(range(NODES))
    for tenant in tenants:
        for name in ("r0", "r1"):
            assert isinstance(await counters.reserve(bucket_request(tenant, name)), BucketGrant)
        assert isinstance(await counters.reserve(bucket_request(tenant, "r2")), Denial)
        assert await counters.extend(tenant, "r0", [1, 9], 5, 5) == 5
        await counters.renew(tenant, ["r0", "r1"], 30_000)
        assert await counters.settle(tenant, "r0", [1, 9], 15)
        assert await counters.settle(tenant, "r1", [0, 0], 0)
        assert isinstance(await counters.reserve(bucket_request(tenant, "r3")), BucketGrant)


async def test_all_keys_of_a_call_lie_in_one_slot(cluster: str, counters: RedisCounters) -> None:
    await counters.reserve(bucket_request("org_slots", "r0"))
    port = int(cluster.rpartition(":")[2])
    with redis.RedisCluster(port=port, host="127.0.0.1") as client:
        keys = list(client.scan_iter(match="*org_slots*", count=1000))
    assert len(keys) >= 6 and len({key_slot(key) for key in keys}) == 1


async def test_a_node_under_a_plain_address_is_refused_with_the_cure(cluster: str) -> None:
    made = RedisCounters(cluster.replace("+cluster", ""))
    with pytest.raises(SettingError, match="one node of a Redis Cluster"):
        await made.start()
    await made.close()
