"""A gateway that is busy is not gone: none of its requests ends. One whose process stops is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from engine.protocol import Receipt
from engine.runners.fake import FakeRunner
from engine.worker.client import EngineClient
from engine.worker.server import Server
from tests.engine.helpers import ask, make_config

TIMEOUT_S = 0.6
# While a function of PyDLL runs, it holds the interpreter's lock, as a long call of a tokenizer does.
GATEWAY = textwrap.dedent("""
    import asyncio, ctypes, sys
    from engine.worker.client import EngineClient
    from tests.engine.helpers import ask

    async def main(address, busy_s):
        client = EngineClient(address, gateway_id="busy", heartbeat_s=0.1, silence_s=1.0)
        await client.connect(30)
        stream = client.generate(ask("r", [1, 2, 3], max_tokens=400))
        items = [await anext(stream)]
        sys.stdout.write("running\\n")
        sys.stdout.flush()
        ctypes.PyDLL(None).usleep(int(busy_s * 1e6))
        items += [item async for item in stream]
        sys.stdout.write(f"{items[-1].finish_reason} {items[-1].generated}\\n")
        await client.close()

    asyncio.run(main(sys.argv[1], float(sys.argv[2])))
""")


@pytest.fixture
def server() -> Iterator[Server]:
    config = make_config(
        heartbeat_s=0.1,
        gateway_timeout_s=TIMEOUT_S,
        listen="tcp://127.0.0.1:0",
        num_blocks=1024,
    )
    made = Server(config, FakeRunner(config, pause=lambda _: time.sleep(0.01)))
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    made.stop(0.0)
    thread.join(30)
    assert not thread.is_alive()


def gateway(server: Server, busy_s: float) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", GATEWAY, server.address, str(busy_s)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_engine_ends_no_request_of_a_gateway_that_is_busy(server: Server) -> None:
    process = gateway(server, busy_s=5 * TIMEOUT_S)
    try:
        assert line_of(process) == "running"
        assert line_of(process) == "length 400"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_the_engine_ends_the_requests_of_a_gateway_whose_process_stops(server: Server) -> None:
    process = gateway(server, busy_s=0)
    try:
        assert line_of(process) == "running"
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: not server.engine.busy)
        assert server.engine.receipts.find("r", "test").finish_reason == "abort"
    finally:
        process.kill()
        process.communicate()


async def test_a_busy_gateway_does_not_take_the_engine_for_gone(server: Server) -> None:
    client = EngineClient(server.address, heartbeat_s=0.1, silence_s=1.0)
    try:
        await client.connect(30)
        stream = client.generate(ask("r", [1, 2, 3], max_tokens=250))
        items = [await anext(stream)]
        await asyncio.sleep(0.2)
        time.sleep(2.0)  # longer than `silence_s`
        items += [item async for item in stream]
        assert isinstance(items[-1], Receipt)
        assert (items[-1].finish_reason, items[-1].generated) == ("length", 250)
    finally:
        await client.close()
