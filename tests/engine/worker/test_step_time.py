"""A step's tokens follow measured time, and no heartbeat waits for a step."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from engine.batch import StepBatch
from engine.loop import Engine
from engine.protocol import EngineStats
from engine.runners.fake import FakeRunner
from engine.worker.client import EngineClient
from engine.worker.server import Server
from tests.engine.helpers import Clock, ask, make_config, run_until_idle


def steps_of(token_s: float, prompts: list[int], **changes: object) -> list[tuple[int, float]]:
    """The tokens and seconds of every step of a device that needs `token_s` for each token."""
    clock, steps = Clock(), []

    def pause(batch: StepBatch) -> None:
        tokens = sum(len(row.tokens) for row in batch.rows)
        clock.now += 0.02 + tokens * token_s
        steps.append((tokens, 0.02 + tokens * token_s))

    config = make_config(num_blocks=2048, max_batch_tokens=512, **changes)
    engine = Engine(config, FakeRunner(config, pause=pause), clock=clock)
    for number, length in enumerate(prompts):
        engine.submit(ask(f"r{number}", [number + 1] * length, max_tokens=8), "g")
    run_until_idle(engine)
    return steps


def test_steps_of_a_slow_device_take_about_half_a_second() -> None:
    steps = steps_of(0.005, [1500, 700, 900])
    assert steps[0][0] <= 128  # nothing is measured yet
    chunks = [seconds for tokens, seconds in steps[4:] if tokens > 32]
    assert chunks and max(chunks) <= 0.5 * 1.1
    assert sum(tokens for tokens, _ in steps) >= 3100
    full = [seconds for seconds in chunks if seconds > 0.4]
    assert len(full) > 0.8 * len(chunks)


def test_a_very_slow_device_still_computes_32_tokens_in_a_step() -> None:
    steps = steps_of(0.1, [600])
    assert {tokens for tokens, _ in steps[2:] if tokens > 1} <= {*range(2, 34)}
    assert max(tokens for tokens, _ in steps[3:]) == 32


@pytest.mark.parametrize(("token_s", "step_s"), [(0.0001, 0.5), (0.005, 0.0)])
def test_a_fast_device_and_no_aim_fill_the_step(token_s: float, step_s: float) -> None:
    assert max(tokens for tokens, _ in steps_of(token_s, [1500, 900], step_s=step_s)) == 512


class LongStep:
    """Every step lasts until the test ends it."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self.begun.set()
        assert self.end.wait(60)


async def test_heartbeats_arrive_during_a_step_and_a_long_one_ends_no_request() -> None:
    step = LongStep()
    config = make_config(heartbeat_s=0.05, gateway_timeout_s=0.5, listen="tcp://127.0.0.1:0")
    server = Server(config, FakeRunner(config, pause=step))
    thread = threading.Thread(target=server.run)
    thread.start()
    client = EngineClient(server.address, heartbeat_s=0.05, silence_s=1.0)
    try:
        await client.connect(30)
        stream = client.generate(ask("r", [1, 2, 3], max_tokens=2))
        first = asyncio.ensure_future(anext(stream))
        assert await asyncio.to_thread(step.begun.wait, 30)
        seen: list[EngineStats] = []
        async with asyncio.timeout(30):
            while len(seen) < 30:  # at 0.05 s each: three times the gateway's timeout
                if not any(client.stats is stats for stats in seen):
                    seen.append(client.stats)
                await asyncio.sleep(0.01)
        assert not first.done()
        step.end.set()
        items = [await first] + [item async for item in stream]
        assert items[-1].finish_reason == "length"
        assert items[-1].generated == 2
    finally:
        step.end.set()
        await client.close()
        server.stop(0.0)
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_the_worker_bounds_spinning_before_torch_is_imported(
    given: dict[str, str], expected: str
) -> None:
    script = (
        "import os, sys\n"
        "from engine.worker import server\n"
        "def serve(config, **_):\n"
        "    print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)\n"
        "server.serve = serve\n"
        "server.main(['--model', 'fake', '--fake'])\n"
    )
    left_out = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    env = {k: v for k, v in os.environ.items() if k not in left_out} | given
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout.split() == [expected, "False"], done.stderr
