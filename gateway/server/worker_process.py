"""One of several gateway processes; `tollhouse serve` starts it as
`python -m gateway.server.worker_process FD PLACE`.
"""

import os
import socket
import sys

from core import logs
from core.settings import load_settings
from gateway.server import cores, one_thread


def main() -> None:
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    if settings.pin_workers:
        cores.keep_to_one(int(sys.argv[2]))
    one_thread.load_numpy()
    from gateway.server.serving import serve_on

    listener = socket.socket(fileno=int(sys.argv[1]))
    serve_on(listener, settings, parent=os.getppid())


if __name__ == "__main__":
    main()
