"""One of several gateway processes; `tollhouse serve` starts it as
`python -m gateway.cli.serve.worker_process FD[,FD] INDEX`: the descriptors of the socket that it
serves and of that of TOLLHOUSE_METRICS_LISTEN.
"""

import os
import socket
import sys

from core import collector, logs
from core.settings import load_settings
from gateway.cli.serve import numpy_threads
from gateway.edge import cpu_affinity


def main() -> None:
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.pin_workers:
        cpu_affinity.pin_to_core(int(sys.argv[2]))
    with collector.paused():
        numpy_threads.load_numpy()
        from gateway.cli.serve.serving import serve_on

    listener, *others = [socket.socket(fileno=int(each)) for each in sys.argv[1].split(",")]
    serve_on(
        listener,
        settings,
        metrics_listener=others[0] if others else None,
        parent=os.getppid(),
    )


if __name__ == "__main__":
    main()
