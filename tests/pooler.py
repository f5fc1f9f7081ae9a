"""A PgBouncer of a test's own, in transaction mode."""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/sbin")
_CONFIG = """[databases]
* = host={host} port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {own}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 2
max_client_conn = 200
server_login_retry = 1
logfile = {folder}/log
user = {runs_as}
"""


@contextmanager
def pgbouncer(server: tuple[str, int], user: str) -> Iterator[int]:
    """Its port. Each database of the server has two connections."""
    if _PROGRAM is None:
        pytest.skip("pgbouncer is not installed; install it (apt-get install pgbouncer)")
    folder = Path(tempfile.mkdtemp(prefix="pgbouncer-"))  # pytest's own folders are root's alone
    folder.chmod(0o777)  # it refuses to run as root and becomes another user
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = probe.getsockname()[1]
    config = folder / "pgbouncer.ini"
    config.write_text(
        _CONFIG.format(
            host=server[0], port=server[1], user=user, own=own, folder=folder, runs_as="nobody"
        )
    )
    process = subprocess.Popen([_PROGRAM, "-q", str(config)], stderr=subprocess.PIPE)
    assert process.stderr is not None
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", own), 1).close()
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                pytest.fail(f"pgbouncer does not listen: {process.stderr.read().decode()}")
            time.sleep(0.05)
    try:
        yield own
    finally:
        process.kill()  # at a SIGTERM it waits for servers, which may be silent
        process.wait(10)
        process.stderr.close()
        shutil.rmtree(folder)
