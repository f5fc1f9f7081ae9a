"""An engine whose device is slow or hangs: `python -m tests.journeys.faulty_engine FILE OPTION…`.

FILE says how many seconds each step takes longer. It is read all the time: `inf` hangs the device in the
step that it is in, until the file says otherwise.
"""

import sys
import time
from pathlib import Path
from typing import Any

from engine.batch import Runner, StepBatch
from engine.config import EngineConfig
from engine.loop import Engine
from engine.worker.server import main


def slow_down(file: Path) -> None:
    plain = Engine.__init__

    def _init(self: Engine, config: EngineConfig, runner: Runner, **more: Any) -> None:
        launch = runner.launch

        def _late(batch: StepBatch) -> Any:
            began = time.monotonic()
            while time.monotonic() - began < float(file.read_text()):
                time.sleep(0.02)
            return launch(batch)

        runner.launch = _late  # type: ignore[method-assign]
        plain(self, config, runner, **more)

    Engine.__init__ = _init  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
