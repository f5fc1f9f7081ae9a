"""`tollhouse picker` behind a real Envoy, as the picker protocol's conformance asks: following, subsets,
large and streamed bodies, refusals, and a proxy that goes on or stops without its picker."""

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.cli.main import main
from tests.gateway.engines.picker.envoy import running_envoy
from tests.gateway.engines.picker.model_servers import ModelServer, running_servers

grpc = pytest.importorskip("grpc", reason="the extra 'picker' is not installed")
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"


class Pool:
    """An Envoy, its picker's process, and three servers."""

    def __init__(self, tmp: Path, servers: list[ModelServer]) -> None:
        self.servers = servers
        self.members = tmp / "members"
        self.list(servers)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gateway.cli.start", "picker", "--listen", "127.0.0.1:0"),
                *("--endpoints-file", str(self.members), "--objective", "batch=-1"),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready = json.loads(line)
        self.port = self.ready["port"]
        self.url = ""

    def list(self, servers: list[ModelServer]) -> None:
        self.members.write_text("# the pool\n" + "".join(f"{s.address}\n" for s in servers))

    def ask(self, text: str, **more: object) -> httpx.Response:
        headers = more.pop("headers", None)
        body = {"model": "base", "messages": [{"role": "user", "content": text}], **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)  # type: ignore[arg-type]

    def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(300):
            if holds():
                return
            time.sleep(0.1)
        raise AssertionError("the picker has not seen the change")

    def stop_reading(self) -> None:
        """Its members cannot be read, so that it goes on with what it knows."""
        self.members.unlink()
        time.sleep(1.2)

    def look(self) -> None:
        """Returns when the picker has read all pages as they are now."""
        before = [each.looks for each in self.servers]
        self.until(lambda: all(s.looks > n + 1 for s, n in zip(self.servers, before, strict=True)))

    def close(self) -> None:
        self.process.terminate()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert self.process.wait(30) == 0


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    tmp = tmp_path_factory.mktemp("picker")
    with running_servers(3) as servers:
        made = Pool(tmp, servers)
        with running_envoy(tmp, made.port, [each.address for each in servers]) as made.url:
            yield made
        made.close()


@pytest.fixture(autouse=True)
def idle(pool: Pool) -> None:
    """All servers are members and idle, and the picker knows it."""
    for server in pool.servers:
        server.running = server.waiting = 0
        server.kv_used, server.adapters, server.answers, server.models = 0.0, "", True, ("base",)
    pool.list(pool.servers)
    pool.look()


def test_it_is_ready_with_its_servers(pool: Pool) -> None:
    assert sorted(pool.ready["servers"]) == sorted(each.address for each in pool.servers)
    with grpc.insecure_channel(f"127.0.0.1:{pool.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness", SERVICE):
            asked = stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert asked.status == health_pb2.HealthCheckResponse.SERVING


def test_a_conversation_stays_where_its_prefix_is_and_others_spread(pool: Pool) -> None:
    homes = []
    for topic in range(6):
        text = f"{topic} " + "a long system prompt about everything. " * 60
        served = {pool.ask(text + turn).json()["server"] for turn in ("one", "two", "three")}
        assert len(served) == 1
        homes += served
    assert Counter(homes).keys() == {each.address for each in pool.servers}


def test_the_queue_and_the_adapter_decide(pool: Pool) -> None:
    first, second, third = pool.servers
    first.waiting = second.waiting = 4
    pool.look()
    assert {pool.ask(f"short {n}").json()["server"] for n in range(5)} == {third.address}
    first.waiting = second.waiting = 0
    second.adapters = "blue,red"
    pool.look()
    assert {pool.ask(f"{n}", model="red").json()["server"] for n in range(5)} == {second.address}


def test_a_model_is_asked_where_it_is_served(pool: Pool) -> None:
    first, *_ = pool.servers
    first.models = ("base", "other")
    listed = first.listed
    pool.until(lambda: first.listed > listed)
    pool.look()
    assert {pool.ask(f"{n}", model="other").json()["server"] for n in range(5)} == {first.address}
    assert pool.ask("known to nobody", model="third").status_code == 200  # the server's to refuse


@pytest.mark.parametrize("size", [0, 1, 60_001, 700_000])
def test_bodies_arrive_as_they_were_sent(pool: Pool, size: int) -> None:
    body = b"x" * size
    answer = httpx.post(f"{pool.url}/v1/completions", content=body, timeout=60).json()
    assert answer["bytes"] == size and answer["digest"] == hashlib.sha256(body).hexdigest()

    def _parts() -> Iterator[bytes]:
        for start in range(0, size, 50_001):
            yield body[start : start + 50_001]

    chunked = httpx.post(f"{pool.url}/v1/completions", content=_parts(), timeout=60).json()
    assert chunked["digest"] == answer["digest"]
    assert httpx.get(f"{pool.url}/health").status_code == 200  # no body at all


def test_a_streamed_answer_arrives_whole(pool: Pool) -> None:
    answer = pool.ask("tell", stream=True)
    assert answer.text.startswith("data: 0\n\n") and answer.text.count("data: ") == 51


def test_a_subset_is_kept_to(pool: Pool) -> None:
    allowed = pool.servers[1].address
    for number in range(6):
        answer = pool.ask(f"{number}", headers={"test-subset": f"{allowed}, 10.0.0.1:80"})
        assert answer.json()["server"] == allowed
    refused = pool.ask("hello", headers={"test-subset": "10.0.0.1:80"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "none-ready"
    assert refused.headers["x-llm-d-request-dropped-reason"] == "none-ready"


def test_what_may_be_refused_is_refused_while_all_are_full(pool: Pool) -> None:
    batch = {"x-llm-d-inference-objective": "batch"}
    assert pool.ask("hello", headers=batch).status_code == 200
    for server in pool.servers:
        server.waiting = 9
    pool.look()
    refused = pool.ask("hello", headers=batch)
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert pool.ask("hello").status_code == 200, "a request with a plain priority goes on"


def test_servers_come_and_go(pool: Pool) -> None:
    first, second, third = pool.servers
    pool.list([first, second])
    pool.until(lambda: third.address not in {pool.ask(f"{n}").json()["server"] for n in range(9)})
    first.answers = second.answers = False
    pool.until(lambda: pool.ask("hello").status_code == 503)
    with grpc.insecure_channel(f"127.0.0.1:{pool.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        pool.until(
            lambda: (
                stub.Check(health_pb2.HealthCheckRequest(service="readiness")).status
                == health_pb2.HealthCheckResponse.NOT_SERVING
            )
        )
    second.answers = True
    pool.until(lambda: pool.ask("hello").status_code == 200)
    pool.members.write_text("not an address\n")
    time.sleep(1.2)  # nothing is read now
    assert pool.ask("hello").json()["server"] == second.address, "the last list stays"


def test_a_proxy_without_its_picker_stops_or_goes_on(tmp_path: Path) -> None:
    with running_servers(2) as servers:
        addresses = [each.address for each in servers]
        for fail_open, status in ((False, 500), (True, 200)):
            folder = tmp_path / str(fail_open)
            folder.mkdir()
            with running_envoy(folder, 9, addresses, fail_open=fail_open) as url:
                assert httpx.get(f"{url}/health").status_code == status


def test_the_next_of_the_list_is_tried_if_a_server_does_not_connect(tmp_path: Path) -> None:
    with running_servers(1) as alive, running_servers(1) as dead:
        made = Pool(tmp_path, [*dead, *alive])
        dead[0].closes = True
        alive[0].waiting = 4  # so that the other is the first choice
        made.look()
        with running_envoy(tmp_path, made.port, [dead[0].address, alive[0].address]) as made.url:
            assert made.ask("hello").json()["server"] == dead[0].address
            made.stop_reading()
            dead[0].stop()
            for number in range(4):
                assert made.ask(f"{number}").json()["server"] == alive[0].address
        made.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--endpoint", "example.com:80"], "example.com:80"),
        (["--endpoint", "10.0.0.1"], "10.0.0.1"),
        (["--endpoint", "10.0.0.1:٣"], "10.0.0.1:٣"),
        (["--endpoints-file", "/nowhere"], "/nowhere"),
        (["--dns", "pool"], "--dns"),
        (["--endpoint", "10.0.0.1:80", "--objective", "batch"], "batch"),
        (["--endpoint", "10.0.0.1:80", "--queue-limit", "0"], "--queue-limit"),
    ],
)
def test_a_wrong_option_is_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["picker", *arguments]) == 2
    assert named in capsys.readouterr().err
