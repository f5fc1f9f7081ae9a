import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import AdapterError, ConnectionLost, RequestError
from engine.protocol import GenerateRequest, Grammar, KvEvent, Receipt, TokenChunk
from engine.runners.fake import FakeRunner
from engine.worker.client import EngineClient
from engine.worker.monitor import Monitor
from engine.worker.server import Server
from tests.engine.helpers import ask, make_config, run_alone, write_adapter
from tests.silent_proxy import SilentProxy


class Worker:
    """A server on a thread of this process."""

    def __init__(self, step_s: float = 0.0, **changes: object) -> None:
        settings = {
            "listen": "tcp://127.0.0.1:0",
            "metrics_port": 0,
            "heartbeat_s": 0.1,
            "gateway_timeout_s": 8.0,
            "num_blocks": 1024,
        }
        config = make_config(**{**settings, **changes})
        pause = (lambda _: time.sleep(step_s)) if step_s else None
        self.server = Server(config, FakeRunner(config, pause=pause))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()

    def stop(self) -> None:
        self.server.stop(0.0)
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.fixture
def worker() -> Iterator[Worker]:
    running = Worker()
    yield running
    running.stop()


@pytest.fixture
def slow_worker() -> Iterator[Worker]:
    running = Worker(step_s=0.01)
    yield running
    running.stop()


@pytest.fixture
async def client(worker: Worker) -> AsyncIterator[EngineClient]:
    async with connected(worker) as one:
        yield one


class connected:
    def __init__(self, worker: Worker, **options: object) -> None:
        self.client = EngineClient(worker.server.address, heartbeat_s=0.1, **options)

    async def __aenter__(self) -> EngineClient:
        await self.client.connect(10)
        return self.client

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()


async def gather(client: EngineClient, request: GenerateRequest) -> tuple[list[int], Receipt]:
    tokens: list[int] = []
    async with asyncio.timeout(60):
        async for item in client.generate(request):
            if isinstance(item, TokenChunk):
                tokens.extend(item.tokens)
            else:
                return tokens, item
    raise AssertionError("no receipt came")


async def wait_until(condition: object, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_tokens_and_the_receipt_come_over_the_wire(client: EngineClient) -> None:
    asks = [ask(f"r{i}", [i + 1] * (10 + i), max_tokens=6) for i in range(20)]
    answers = await asyncio.gather(*(gather(client, one) for one in asks))
    for one, (tokens, receipt) in zip(asks, answers, strict=True):
        assert tokens == run_alone(one)[0]
        assert receipt.request_id == one.request_id
        assert receipt.generated == receipt.delivered == 6
    assert client.info.block_size == 4
    assert len(client.info.engine_id) == 32


async def test_a_refusal_names_its_code_and_the_next_request_is_served(
    client: EngineClient,
) -> None:
    with pytest.raises(RequestError) as caught:
        await gather(client, ask("bad", [99999]))
    assert caught.value.code == "invalid_request"
    with pytest.raises(RequestError) as caught:
        await gather(client, ask("lost", [1], adapter="ab" * 32))
    assert caught.value.code == "adapter_not_found"
    assert len((await gather(client, ask("good", [1])))[0]) == 4


async def test_a_request_that_cannot_be_read_is_refused_and_does_not_hang(
    client: EngineClient,
) -> None:
    for number, changes in enumerate([{"max_tokens": "many"}, {"prompt": ["one"]}]):
        with pytest.raises(RequestError, match="a Generate message is invalid"):
            await gather(client, ask(f"odd{number}", changes.pop("prompt", [1]), **changes))


async def test_an_abort_gives_a_last_chunk_and_a_receipt(slow_worker: Worker) -> None:
    async with connected(slow_worker) as client:
        items = []
        async with asyncio.timeout(60):
            async for item in client.generate(ask("r", [5, 6], max_tokens=1000)):
                items.append(item)
                if len(items) == 3:
                    client.abort_soon("r")
        receipt = items[-1]
        assert isinstance(receipt, Receipt)
        assert receipt.finish_reason == "abort"
        assert items[-2].finish_reason == "abort"
        assert receipt.delivered == sum(len(i.tokens) for i in items[:-1])


async def test_a_stream_closed_early_is_aborted_and_its_receipt_reaches_the_handler(
    slow_worker: Worker,
) -> None:
    found: list[Receipt] = []
    async with connected(slow_worker, on_receipt=found.append) as client:
        stream = client.generate(ask("r", [5, 6], max_tokens=1000))
        await anext(stream)
        await stream.aclose()
        await wait_until(lambda: found)
    assert found[0].finish_reason == "abort"


async def test_adapters_are_loaded_used_and_unloaded_over_the_wire(
    client: EngineClient, tmp_path: Path
) -> None:
    path, digest = write_adapter(tmp_path, "one", rank=8)
    state = await client.load_adapter(path)
    assert (state.digest, state.state, state.rank) == (digest, "host", 8)
    one = ask("r", [3, 4, 5], adapter=digest)
    tokens, receipt = await gather(client, one)
    assert tokens == run_alone(one, path)[0]
    assert receipt.adapter == digest
    await client.unload_adapter(digest)
    with pytest.raises(AdapterError, match="not loaded"):
        await client.unload_adapter(digest)
    with pytest.raises(AdapterError, match="nowhere"):
        await client.load_adapter(str(tmp_path / "nowhere"))


async def test_receipts_are_repeated_to_the_same_gateway_until_acknowledged(
    worker: Worker,
) -> None:
    async with connected(worker, gateway_id="gw") as client:
        _, receipt = await gather(client, ask("r", [1, 2, 3]))
    again: list[Receipt] = []
    async with connected(worker, gateway_id="gw", on_receipt=again.append) as client:
        assert again == [receipt]
        assert (await client.look_up(["r", "never"])).receipts == [receipt]
        await client.acknowledge(["r"])
        assert (await client.look_up(["r"])).receipts == []
    again.clear()
    async with connected(worker, gateway_id="gw", on_receipt=again.append):
        assert again == []


@pytest.fixture
def impatient_worker() -> Iterator[Worker]:
    running = Worker(step_s=0.01, gateway_stall_s=2.0)
    yield running
    running.stop()


async def test_a_gateway_that_hangs_has_its_requests_ended_and_receipts_kept(
    impatient_worker: Worker,
) -> None:
    first = connected(impatient_worker, gateway_id="gw")
    client = await first.__aenter__()
    stream = client.generate(ask("r", [1, 2], max_tokens=4000))
    await anext(stream)
    for task in client._tasks:  # the gateway hangs: its connection stays, it says nothing
        task.cancel()
    engine = impatient_worker.server.engine
    await wait_until(lambda: not engine.busy)
    assert engine.receipts.find("r", "test").finish_reason == "abort"
    await client.close()
    await stream.aclose()
    async with connected(impatient_worker) as other:
        reply = await other.look_up(["r"])
        assert reply.receipts[0].generated > 0


async def test_two_gateways_at_once_get_their_own_answers(worker: Worker) -> None:
    async with connected(worker) as one, connected(worker) as two:
        asks = [ask(f"r{i}", [i + 1] * 12, max_tokens=9) for i in range(10)]
        answers = await asyncio.gather(
            *(gather(one if i % 2 else two, a) for i, a in enumerate(asks))
        )
        for a, (tokens, _) in zip(asks, answers, strict=True):
            assert tokens == run_alone(a)[0]


async def test_heartbeats_carry_load_and_metrics_are_served(
    slow_worker: Worker,
) -> None:
    async with connected(slow_worker) as client:
        stream = client.generate(ask("r", [1, 2], max_tokens=1000))
        await anext(stream)
        await wait_until(lambda: client.stats is not None and client.stats.running == 1)
        text = await asyncio.to_thread(fetch, slow_worker.server.monitor.url)
        assert 'vllm:num_requests_running{model_name="fake"} 1' in text
        assert "tollhouse_engine_generated_tokens_total" in text
        health = slow_worker.server.monitor.url.replace("/metrics", "/healthz")
        assert await asyncio.to_thread(fetch, health) == "ok\n"
        await stream.aclose()


async def test_readiness_names_each_part_and_ends_with_the_drain(slow_worker: Worker) -> None:
    server = slow_worker.server
    ready = server.monitor.url.replace("/metrics", "/readyz")
    health = server.monitor.url.replace("/metrics", "/healthz")
    verdict = json.loads(await asyncio.to_thread(fetch, ready))
    assert verdict["status"] == "ready"
    assert {name: part["ready"] for name, part in verdict["parts"].items()} == {
        "loop": True, "device": True, "requests": True,
    }  # fmt: skip
    async with connected(slow_worker) as client:
        stream = client.generate(ask("r", [1, 2], max_tokens=1000))
        await anext(stream)
        server.stop(60)
        with pytest.raises(urllib.error.HTTPError) as refused:
            await asyncio.to_thread(fetch, ready)
        verdict = json.load(refused.value)
        assert (refused.value.code, verdict["status"]) == (503, "not ready")
        assert "stopping" in verdict["parts"]["requests"]["error"]
        assert await asyncio.to_thread(fetch, health) == "ok\n"  # nobody has to restart it
        await stream.aclose()


@pytest.mark.parametrize(
    ("fault", "part", "error"),
    [("last_turn", "loop", "has stalled"), ("failures_in_a_row", "device", "3 steps failed")],
)
def test_a_fault_of_the_engine_fails_both_probes(fault: str, part: str, error: str) -> None:
    engine = SimpleNamespace(failures_in_a_row=3 if part == "device" else 0)
    last_turn = time.monotonic() - (61 if part == "loop" else 0)
    config = make_config(metrics_port=0)
    server = SimpleNamespace(config=config, engine=engine, last_turn=last_turn, draining=False)
    monitor = Monitor(server)
    for path in ("/healthz", "/readyz"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(monitor.url.replace("/metrics", path))
        assert refused.value.code == 503 and error in refused.value.read().decode()
    monitor.close()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()


async def test_kv_events_tell_what_is_cached(worker: Worker) -> None:
    told: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
    async with connected(worker, on_kv_events=told.put_nowait) as client:
        await gather(client, ask("r", list(range(1, 13))))
        async with asyncio.timeout(60):
            assert (await told.get())[0].kind == "cleared"
            events = await told.get()
    assert [event.kind for event in events] == ["stored"] * 3
    assert events[1].parent == events[0].hashes[0]
    async with connected(worker, on_kv_events=told.put_nowait), asyncio.timeout(60):
        assert (await told.get())[0].kind == "cleared"
        (everything,) = await told.get()
    assert everything.hashes == [event.hashes[0] for event in events]


def start_process(*options: str) -> tuple[subprocess.Popen, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "engine.worker.server", "--model", "fake", "--fake", *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    ready = json.loads(process.stdout.readline())
    assert ready["event"] == "ready"
    return process, ready["address"]


async def test_a_killed_engine_fails_streams_at_once_and_its_receipts_survive(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/engine.sock"
    options = ("--listen", address, "--receipts", str(tmp_path / "receipts"))
    process, _ = start_process(*options)
    client = EngineClient(address, gateway_id="gw", heartbeat_s=0.1, grace_s=0.5)
    try:
        await client.connect(20)
        _, receipt = await gather(client, ask("done", [1, 2, 3]))
        stream = client.generate(ask("cut", [1, 2, 3], max_tokens=4000))
        await anext(stream)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ConnectionLost):
            async with asyncio.timeout(60):
                async for _ in stream:
                    pass
        with pytest.raises(ConnectionLost):
            await gather(client, ask("early", [1]))
        process.wait(10)
        process.stdout.close()
        process, _ = start_process(*options)
        await client.connect(20)
        found = await client.look_up(["done", "cut"])
        assert found.receipts == [receipt]
        assert found.under_way == []
        await gather(client, ask("after", [1, 2]))
    finally:
        await client.close()
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close()


def test_a_read_from_disk_does_not_slow_the_steps_of_others() -> None:
    config = make_config(listen="tcp://127.0.0.1:0")
    server = Server(config, FakeRunner(config))
    try:
        server.engine.adapters.host._submit = lambda work: Future()
        server.engine.adapters.host.read("path", lambda future: None)
        assert server._poll_timeout_s() > 0
        server.engine.submit(ask("r", [1, 2], max_tokens=50), "g")
        server.turn()
        assert server.engine.busy
        assert server._poll_timeout_s() == 0
    finally:
        server.close()


def test_a_wrong_address_and_a_wrong_setting_are_named() -> None:
    command = [sys.executable, "-m", "engine.worker.server", "--model", "fake", "--fake"]
    for option, words in [
        (("--listen", "tcp://256.0.0.1:1"), "cannot listen on tcp://256.0.0.1:1"),
        (("--block-size", "0"), "block_size is 0"),
    ]:
        ran = subprocess.run([*command, *option], capture_output=True, text=True, timeout=60)
        assert ran.returncode == 1
        assert words in ran.stderr
        assert "Traceback" not in ran.stderr


@pytest.fixture
def grammar_gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What preparing the grammar "slow" waits for; "bad" is refused."""
    gate = threading.Event()

    def prepare(_runner: FakeRunner, grammar: Grammar) -> None:
        if grammar.text == "bad":
            raise RequestError("invalid_grammar", "the regex cannot be served: bad")
        if grammar.text == "slow":
            gate.wait(20)

    monkeypatch.setattr(FakeRunner, "prepare_grammar", prepare)
    return gate


# The gate comes before the worker, which keeps its runner's method.
async def test_grammars_are_tried_beside_the_steps(
    grammar_gate: threading.Event, slow_worker: Worker
) -> None:
    """A slow grammar delays its own request only; a refused one is told why; both orders of aborts
    end with a receipt."""
    async with connected(slow_worker) as client:
        slow: asyncio.Queue = asyncio.Queue()
        await client.submit(ask("slow", [5], 3, grammar=Grammar("regex", "slow")), slow)
        aborted: asyncio.Queue = asyncio.Queue()
        await client.submit(ask("aborted", [5], 3, grammar=Grammar("regex", "x")), aborted)
        free: asyncio.Queue = asyncio.Queue()
        await client.submit(ask("free", [5], 3), free)
        assert isinstance(await receipt_of(free), Receipt)
        assert slow.empty()
        client.abort_soon("aborted")
        await asyncio.sleep(0.1)
        grammar_gate.set()
        assert (await receipt_of(slow)).generated == 3
        assert (await receipt_of(aborted)).finish_reason == "abort"
        refused: asyncio.Queue = asyncio.Queue()
        await client.submit(ask("bad", [5], 3, grammar=Grammar("regex", "bad")), refused)
        error = await asyncio.wait_for(refused.get(), 20)
        assert isinstance(error, RequestError) and error.code == "invalid_grammar"


async def receipt_of(queue: "asyncio.Queue") -> Receipt:
    while True:
        item = await asyncio.wait_for(queue.get(), 20)
        if not isinstance(item, TokenChunk):
            return item


async def test_a_connection_that_goes_silent_is_replaced(worker: Worker) -> None:
    """A balancer keeps its side of a connection open although the engine's side is gone."""
    host, port = worker.server.address.removeprefix("tcp://").split(":")
    async with SilentProxy((host, int(port))) as proxy:
        near = "tcp://{}:{}".format(*proxy.address)
        client = EngineClient(near, heartbeat_s=0.1, unanswered_s=0.5, grace_s=0.2)
        await client.connect(10)
        assert (await gather(client, ask("before", [1] * 9, max_tokens=3)))[1].generated == 3
        proxy.silence()
        await wait_until(lambda: proxy.connections > 1)
        await client.connect(10)
        assert (await gather(client, ask("after", [2] * 9, max_tokens=3)))[1].generated == 3
        await client.close()
