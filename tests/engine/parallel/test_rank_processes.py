"""Ranks as processes: they answer, and one that ends, hangs or comes twice is named."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.errors import RankError
from engine.loop import Engine
from engine.parallel import rendezvous, start
from engine.parallel.runner import ParallelRunner
from engine.runners.cpu.runner import load_runner
from tests.engine.checkpoints import save_checkpoint
from tests.engine.parallel.test_group_of_ranks import answers_of, config_of, request

pytestmark = pytest.mark.slow
STALL_S = 4.0


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("llama"))


@contextlib.contextmanager
def ranks(config: EngineConfig) -> Iterator[tuple[ParallelRunner, start._Ranks]]:
    made: list[start._Ranks] = []

    class Kept(start._Ranks):
        def __init__(self, config: EngineConfig) -> None:
            super().__init__(config)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "_Ranks", Kept)
        runner = start.start_ranks(config)
    try:
        yield runner, made[0]
    finally:
        runner.close()
    assert all(process.poll() is not None for process in made[0]._processes.values())
    assert not Path(made[0]._meeting.memory).exists()


def test_processes_answer_as_one_and_a_killed_rank_ends_the_group(llama: Path) -> None:
    config = config_of(llama, tp=2)
    asked = [request(1, 40), request(2, 5), request(3, 70, n=2, temperature=0.8, seed=7)]
    alone = Engine(config_of(llama), load_runner(config_of(llama)))
    with ranks(config) as (runner, group):
        engine = Engine(config, runner)
        assert answers_of(engine, asked) == answers_of(alone, asked)
        with socket.socket(socket.AF_UNIX) as twice:
            twice.connect(group._meeting.socket)
            rendezvous.send(twice, {"rank": 1, "digest": group._meeting.digest})
            assert "connected before" in next(rendezvous.records(twice))["refused"]
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(group._meeting.socket)
            rendezvous.send(other, {"rank": 1, "digest": "of other settings"})
            assert "other settings" in next(rendezvous.records(other))["refused"]
        engine.submit(request(9, 30, max_tokens=100), "me")
        engine.step()
        os.kill(group._processes[1].pid, signal.SIGKILL)
        with pytest.raises(RankError, match=r"rank 1 .*SIGKILL"):
            while engine.step():
                pass
        engine.abandon("ended")
        receipts = [r for each in engine.take_outboxes().values() for r in each.receipts]
        assert [(each.request_id, each.message) for each in receipts] == [("r9", "ended")]


def test_a_rank_that_hangs_ends_the_group_within_the_deadline(llama: Path) -> None:
    config = config_of(llama, tp=2, stall_s=STALL_S)
    with ranks(config) as (runner, group):
        engine = Engine(config, runner)
        engine.submit(request(9, 30, max_tokens=100), "me")
        engine.step()
        os.kill(group._processes[1].pid, signal.SIGSTOP)
        begun = time.monotonic()
        with pytest.raises(RankError, match="rank 1 did not come within 4 s to a"):
            while engine.step():
                pass
        assert time.monotonic() - begun < 3 * STALL_S
