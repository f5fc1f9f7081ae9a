"""The harness of vLLM's tests leaves no server behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.vllm_suite import groups

_SERVER = "import sys, time; sys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(600)"
_DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {_SERVER}"


def _lives(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="reads /proc")
@pytest.mark.parametrize("server", [_SERVER, _DEAF])
def test_a_suite_that_is_cut_off_leaves_no_server(server: str) -> None:
    starts = (
        "import subprocess, sys;"
        f" p = subprocess.Popen([sys.executable, '-c', {server!r}]);"
        " print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, start_new_session=True
    ) as suite:
        assert suite.stdout is not None
        lines = [suite.stdout.readline().split(), suite.stdout.readline().split()]
        pid = next(int(line[0]) for line in lines if line != [b"up"])
        assert _lives(pid)
        groups.end(suite, grace_s=2.0)
    deadline = time.monotonic() + 10
    while _lives(pid):
        assert time.monotonic() < deadline, "the server lives on"
        time.sleep(0.05)
    assert not _lives(suite.pid)
