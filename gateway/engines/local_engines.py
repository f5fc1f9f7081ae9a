"""The engines that a start spawns on this machine: one slot each, shared by all gateway processes."""

import json
import logging
import shutil
import tempfile
import time
from pathlib import Path

from core.errors import Unavailable
from core.settings import Settings
from gateway.catalog.model_files import model_directory, model_name
from gateway.engines.local import EngineOptions, EngineProcess

log = logging.getLogger("tollhouse.engine")
_SAY_EVERY_S = 10.0


class LocalEngines:
    def __init__(self, settings: Settings) -> None:
        # A short path: the name of an ipc socket has about a hundred characters.
        self._home = Path(tempfile.mkdtemp(prefix="tollhouse-"))
        self._settings = settings
        directory = model_directory(settings)
        self.processes = [
            EngineProcess(
                EngineOptions(
                    model=str(directory),
                    address=f"ipc://{self._home}/engine-{slot}.sock",
                    receipts=settings.data_dir / "receipts" / f"engine-{slot}.log",
                    dtype=settings.dtype,
                    kv_memory_mb=settings.kv_memory_mb,
                )
            )
            for slot in range(settings.engines)
        ]

    def upstreams(self) -> str:
        """As TOLLHOUSE_UPSTREAMS, for the gateway processes."""
        return json.dumps(
            [
                {"url": each.options.address, "name": f"local-{slot}"}
                for slot, each in enumerate(self.processes)
            ]
        )

    def start(self) -> None:
        for each in self.processes:
            each.start()

    def wait_ready(self, timeout_s: float = 1800.0) -> float:
        """Seconds until all are ready. Unavailable, with the engine's own words, if one fails."""
        began = time.monotonic()
        for each in self.processes:
            while not each.wait_ready(_SAY_EVERY_S):
                waited = time.monotonic() - began
                if each.problem:
                    raise Unavailable(
                        f"The engine cannot start: {each.problem}",
                        next_step="Correct TOLLHOUSE_MODEL, or see the engine's log above.",
                    )
                if waited > timeout_s:
                    raise Unavailable("The engine did not get ready in time.")
                log.info("loading %s, %.0f s so far", model_name(self._settings), waited)
        return time.monotonic() - began

    def stop(self) -> None:
        for each in self.processes:
            each.stop()
        shutil.rmtree(self._home, ignore_errors=True)
