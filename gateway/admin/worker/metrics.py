"""Starts the process that serves a worker's metrics.

Import it before prometheus_client, which decides at its import whether this process's metrics go to
the shared directory.
"""

import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from core.errors import SettingError

DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def serve_metrics(
    host: str, port: int | None, *, prefix: str = "tollhouse", has_schedule: bool = False
) -> Iterator[str]:
    """Serve /metrics, /healthz and /readyz while the context is open; port 0 chooses a free one, None
    serves none. Yields the name of the worker's own queue; "" without a port."""
    if port is None:
        yield ""
        return
    if "prometheus_client" in sys.modules:
        raise RuntimeError("prometheus_client was imported before the metrics directory was set")
    os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="tollhouse-metrics-")
    queue = f"worker.{uuid.uuid4().hex}"
    schedule = "schedule" if has_schedule else ""
    command = [sys.executable, "-m", "gateway.admin.worker.metrics_server", host, str(port)]
    command += [prefix, queue, schedule]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        answer, _, detail = process.stdout.readline().strip().partition(" ")
        if answer != "ready":
            raise SettingError(
                f"The metrics cannot be served on {host}:{port}: {detail or 'the process ended'}.",
                next_step="Choose another port with --metrics-port; 0 takes a free one.",
            )
        sys.stderr.write(f"metrics on http://{host}:{detail}/metrics\n")
        yield queue
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
