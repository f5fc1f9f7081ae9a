"""An engine process that hangs or dies when it is asked to, with the options of
`engine.worker.server`."""

import json
import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from engine.batch import Sampled, StepBatch
from engine.config import EngineConfig
from engine.protocol import AdapterState
from engine.runners.fake import FakeRunner
from engine.worker import server
from engine.worker.watchdog import Watchdog

HANG, DIE = 666, 667  # as the first token of a prompt
HANGS = "hangs"  # in an adapter's configuration


def hang() -> None:
    """As a hostile regular expression does: no other thread of the process runs any more."""
    re.match(r"(a+)+$", "a" * 64 + "b")


class HangingRunner(FakeRunner):
    def launch(self, batch: StepBatch) -> list[Sampled]:
        first = {row.history[0] for row in batch.rows}
        if DIE in first:
            time.sleep(0.2)  # as a crash in a kernel: ZeroMQ has sent what was announced before
            os.kill(os.getpid(), signal.SIGKILL)
        if HANG in first:
            hang()
        return super().launch(batch)

    def register_adapter(self, path: str) -> AdapterState:
        if json.loads((Path(path) / "adapter_config.json").read_text()).get(HANGS):
            hang()
        return super().register_adapter(path)


def _runner(config: EngineConfig, fake: bool) -> Any:
    return HangingRunner(config)


if __name__ == "__main__":
    server.make_runner = _runner
    server.Watchdog = partial(Watchdog, blocked_s=4.0)  # type: ignore[assignment, misc]
    sys.exit(server.main())
