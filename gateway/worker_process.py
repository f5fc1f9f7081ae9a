"""One of several gateway processes: `python -m gateway.worker_process FD`, started by `serve`."""

import os
import socket
import sys

from core import logs
from core.settings import load_settings
from gateway import one_thread


def main() -> None:
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    one_thread.load_numpy()
    from gateway.serving import serve_on

    listener = socket.socket(fileno=int(sys.argv[1]))
    serve_on(listener, settings, parent=os.getppid())


if __name__ == "__main__":
    main()
