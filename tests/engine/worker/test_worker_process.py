"""The worker as a process, and what strangers on its socket may do to it: nothing."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
import zmq.auth
from prometheus_client.parser import text_string_to_metric_families

from engine.config import EngineConfig
from engine.errors import ConfigError, ConnectionLost, RequestError
from engine.protocol import FinishReason, Receipt, TokenChunk
from engine.runners.fake import FakeRunner
from engine.worker.client import EngineClient
from engine.worker.curve import ClientKeys
from engine.worker.server import Server
from engine.worker.wire import (
    Generate,
    Heartbeat,
    Identify,
    WireError,
    decode,
    encode,
    request_id_of,
)
from tests.engine.helpers import ask, make_config, make_engine, run_until_idle
from tests.engine.worker.test_server import Worker, connected, gather, start_process, wait_until


async def test_sigterm_lets_running_requests_finish_and_refuses_new_ones() -> None:
    process, address = start_process("--listen", "tcp://127.0.0.1:0", "--heartbeat-s", "0.02")
    client = EngineClient(address, heartbeat_s=0.1)
    try:
        await client.connect(20)
        stream = client.generate(ask("r", [1, 2], max_tokens=4000))
        count = len((await anext(stream)).tokens)
        process.send_signal(signal.SIGTERM)
        await wait_until(lambda: client.stats is not None and client.stats.draining)
        with pytest.raises((RequestError, ConnectionLost)):
            await gather(client, ask("late", [1]))
        async with asyncio.timeout(60):
            async for item in stream:
                if isinstance(item, TokenChunk):
                    count += len(item.tokens)
        assert isinstance(item, Receipt)
        assert item.finish_reason == FinishReason.LENGTH
        assert count == item.generated == 4000
        assert process.wait(10) == 0
    finally:
        await client.close()
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    script = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-m', 'engine.worker.server', '--model', 'fake', '--fake',"
        " '--exit-with-parent'], stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline()\n"
        "print(p.pid, flush=True)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    pid = int(ran.stdout)

    async def gone() -> None:
        await wait_until(lambda: not Path(f"/proc/{pid}").exists() or _zombie(pid))

    asyncio.run(gone())


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


# Bytes that no MessagePack has, text that is no UTF-8, and a thousand arrays in each other.
UNREADABLE = [b"\xc1", b"\xa1\xcd", b"\x81\xa7request\x81\xaarequest_id\xa1\xcd", b"\x91" * 5000]


def _generate(body: bytes) -> bytes:
    """A Generate message of any body."""
    return encode(Generate(ask("r", [1])))[:9] + body


@pytest.mark.parametrize("body", UNREADABLE)
def test_what_cannot_be_read_is_one_error(body: bytes) -> None:
    with pytest.raises(WireError):
        decode(_generate(body))
    assert request_id_of(_generate(body)) is None


async def test_rubbish_on_the_socket_changes_nothing() -> None:
    worker = Worker()
    context = zmq.asyncio.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(worker.server.address)
    try:
        for rubbish in [b"", b"x", b"\xff" * 40, *map(_generate, UNREADABLE), os.urandom(999)]:
            await stranger.send(rubbish)
        await stranger.send_multipart([b"a", b"b", b"c"])
        await stranger.send(encode(Generate(ask("r", [1]))))
        async with asyncio.timeout(60):
            record, _ = decode(await stranger.recv())
        assert record == Identify()
        async with connected(worker) as client:
            assert len((await gather(client, ask("good", [1, 2])))[0]) == 4
    finally:
        stranger.close(linger=0)
        context.term()
        worker.stop()


def test_wire_refuses_what_is_not_ours() -> None:
    good = encode(Heartbeat())
    assert decode(good)[0] == Heartbeat()
    for bad in [good[:5], b"\xfe" + good[1:], encode(Generate(ask("r", [1])))[:-3]]:
        with pytest.raises(WireError):
            decode(bad)


async def test_curve_lets_listed_keys_in_and_nobody_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("engine", "gateway", "stranger"):
        zmq.auth.create_certificates(tmp_path, name)
    public, _ = zmq.auth.load_certificate(tmp_path / "gateway.key")
    listed = tmp_path / "listed"
    listed.write_bytes(public + b"\n")
    worker = Worker(
        server_key_file=str(tmp_path / "engine.key_secret"), client_keys_file=str(listed)
    )

    def keys(name: str) -> ClientKeys:
        return ClientKeys.load(str(tmp_path / f"{name}.key_secret"), str(tmp_path / "engine.key"))

    try:
        async with connected(worker, keys=keys("gateway")) as client:
            assert len((await gather(client, ask("r", [1, 2])))[0]) == 4
        secret = keys("gateway").secret
        other = ClientKeys(public, public, secret)  # with its own key in place of the engine's
        for own, why in (
            (keys("stranger"), "does not accept this gateway's CURVE key"),
            (other, "another key than the configured one"),
            (None, "only one side uses keys"),
        ):
            outside = EngineClient(worker.server.address, keys=own)
            async with asyncio.timeout(60):
                with pytest.raises(ConnectionLost, match="did not answer") as refused:
                    await outside.connect(0.7)
                while why not in str(refused.value):
                    with pytest.raises(ConnectionLost) as refused:
                        await outside.connect(0.2)
            await outside.close()
            refusals = worker.server._listener.refused
            assert refusals is not None and refusals.count >= 1
        with urllib.request.urlopen(worker.server.monitor.url, timeout=60) as page:
            families = text_string_to_metric_families(page.read().decode())
        [shown] = [each for each in families if each.name == "tollhouse_engine_refused_handshakes"]
        assert shown.samples[0].value >= 3
        assert "CURVE key is not in client_keys_file" in caplog.text
    finally:
        worker.stop()


async def test_a_gateways_key_is_exchanged_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two keys are accepted at a time; a file that cannot be used changes nothing."""
    for name in ("engine", "old", "new"):
        zmq.auth.create_certificates(tmp_path, name)
    old, new = (zmq.auth.load_certificate(tmp_path / f"{name}.key")[0] for name in ("old", "new"))
    listed = tmp_path / "listed"
    listed.write_bytes(old + b"\n")
    worker = Worker(
        server_key_file=str(tmp_path / "engine.key_secret"), client_keys_file=str(listed)
    )

    async def _answers(name: str, seconds: float) -> bool:
        own = ClientKeys.load(str(tmp_path / f"{name}.key_secret"), str(tmp_path / "engine.key"))
        client = EngineClient(worker.server.address, keys=own)
        try:
            await client.connect(seconds)
        except ConnectionLost:
            return False
        finally:
            await client.close()
        return True

    try:
        for content, accepted in (
            (old, ["old"]),
            (old + b"\n" + new, ["old", "new"]),
            (b"no key", ["old", "new"]),
            (None, ["old", "new"]),
            (new + b"\n\n", ["new"]),
        ):
            listed.unlink()
            if content is not None:
                listed.write_bytes(content)
            for name in ("old", "new"):
                answers = await _answers(name, 60 if name in accepted else 0.7)
                assert answers == (name in accepted), (content, name)
            listed.touch()
        assert "the accepted keys stay as they were" in caplog.text
    finally:
        worker.stop()


def test_curve_settings_that_would_let_anybody_in_are_refused(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "engine")
    key = str(tmp_path / "engine.key_secret")
    for changes, words in [
        ({"server_key_file": key}, "any key"),
        ({"client_keys_file": key}, "server_key_file"),
        ({"server_key_file": "/nowhere", "client_keys_file": key}, "/nowhere"),
    ]:
        config = EngineConfig(model="fake", **changes)
        with pytest.raises(ConfigError, match=words):
            Server(config, FakeRunner(config))


def test_metrics_are_prometheus_text_with_the_names_that_dashboards_know() -> None:
    engine = make_engine()
    for number in range(3):
        engine.submit(ask(f"r{number}", [1, 2, 3, 4, 5]), "g")
    found = run_until_idle(engine)
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(engine.metrics_text()):
        for sample in family.samples:
            samples[sample.name] = sample.value
    assert samples["vllm:num_requests_running"] == 0
    assert samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["vllm:lora_requests_info"] == 1
    assert samples["vllm:generation_tokens_total"] == 12
    assert samples["vllm:time_to_first_token_seconds_count"] == 3
    assert samples["vllm:prefix_cache_queries_total"] == 15
    assert samples["tollhouse_engine_generated_tokens_total"] == sum(
        r.generated for r in found.receipts.values()
    )


def test_books_that_disagree_stop_the_engine_and_leave_receipts(tmp_path: Path) -> None:
    receipts = tmp_path / "receipts"
    config = make_config(listen="tcp://127.0.0.1:0", receipts_file=str(receipts))
    server = Server(config, FakeRunner(config))
    server.engine.submit(ask("r", [1, 2, 3], max_tokens=50), "g")
    server.turn()
    server.engine.pool.refs[0] += 5
    server.engine.abort("r")
    with pytest.raises(Exception, match="block"):
        server.run()
    lines = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert lines[0]["receipt"]["request_id"] == "r"


async def test_kills_at_random_lose_no_receipt_that_was_given(tmp_path: Path) -> None:
    """What a client was told stands in the next engine's book, until it is acknowledged."""
    address = f"ipc://{tmp_path}/engine.sock"
    options = ("--listen", address, "--receipts", str(tmp_path / "receipts"))
    client = EngineClient(address, gateway_id="gw", heartbeat_s=0.1, grace_s=0.3)
    told: dict[str, Receipt] = {}
    seen: dict[str, int] = {}

    async def stream(name: str, length: int) -> None:
        seen[name] = 0
        try:
            async for item in client.generate(ask(name, [1, 2, 3], max_tokens=length)):
                if isinstance(item, TokenChunk):
                    seen[name] += len(item.tokens)
                else:
                    told[name] = item
        except ConnectionLost:
            return

    process = None
    try:
        for turn in range(3):
            process, _ = start_process(*options)
            async with asyncio.timeout(60):
                while not client.connected:
                    await client.connect(20)
            lengths = [2 ** (i % 12) + 1 for i in range(16)]
            work = [asyncio.create_task(stream(f"{turn}-{i}", n)) for i, n in enumerate(lengths)]
            await wait_until(lambda turn=turn: sum(n.startswith(f"{turn}-") for n in told) >= 4)
            process.kill()
            process.wait(10)
            process.stdout.close()
            await asyncio.wait_for(asyncio.gather(*work), 20)
        process, _ = start_process(*options)
        await client.connect(20)
        found = {r.request_id: r for r in (await client.look_up(list(seen))).receipts}
        assert told.items() <= found.items()
        assert all(receipt.delivered >= seen[name] for name, receipt in found.items())
        assert len(told) < len(seen), "no stream was cut: the kills came too late"
        await client.acknowledge(list(found))
        assert (await client.look_up(list(seen))).receipts == []
    finally:
        await client.close()
        if process is not None:
            process.terminate()
            process.wait(10)
            process.stdout.close()
