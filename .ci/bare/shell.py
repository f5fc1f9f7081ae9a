"""Runs commands with a clean environment and a time limit, and searches their output for tracebacks."""

import os
import re
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

DROPPED = ("TOLLHOUSE_", "PYTHON", "MAKE", "VIRTUAL_ENV", "MFLAGS", "VENV", "MODEL")
_SHOWN = 4000  # characters of a failed command's output


class Failed(Exception):
    """The message says what was expected and what happened."""


def environment(**given: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **given}


def say(text: str) -> None:
    print(text, flush=True)


def say_command(words: list[str]) -> None:
    """Without the directory that all is in, and without keys."""
    line = re.sub(r"\S*/tollhouse-bare-\w+/", "", " ".join(words))
    say("$ " + re.sub(r"\bth_\w+", "th_…", line)[:200])


def check_output(what: str, text: str) -> None:
    if "Traceback (most recent call last)" in text:
        raise Failed(f"{what} wrote a traceback:\n{text[-_SHOWN:]}")


@dataclass
class Shell:
    """Runs commands in one directory with one environment."""

    home: Path
    env: dict[str, str] = field(default_factory=environment)

    def run(self, *words: str | Path, code: int = 0, limit_s: float = 600) -> str:
        """stdout and stderr together. Failed for another exit code, a traceback or the limit."""
        what = " ".join(str(word) for word in words)
        say_command([str(word) for word in words])
        try:
            done = subprocess.run(
                [str(word) for word in words],
                cwd=self.home,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            raise Failed(f"{what} took longer than {limit_s:.0f} s:\n{late.output!r}") from None
        check_output(what, done.stdout)
        if done.returncode != code:
            raise Failed(f"{what}: exit {done.returncode}, not {code}:\n{done.stdout[-_SHOWN:]}")
        return done.stdout


class Background:
    """A command that stays, its screen in a file. Ended with its children when the block ends."""

    def __init__(self, shell: Shell, *words: str | Path, terminal: bool = False) -> None:
        self._shell, self._words = shell, [str(word) for word in words]
        self._terminal = terminal
        self._log = shell.home / f"{Path(self._words[0]).name}-{time.monotonic_ns()}.log"

    def __enter__(self) -> "Background":
        words = self._words
        if self._terminal:  # `script` of util-linux is not everywhere; Python's own pty is
            words = ["python3", "-c", _ON_A_TERMINAL, *words]
        say_command([*self._words, "&"])
        with self._log.open("wb") as screen:
            self.process = subprocess.Popen(
                words,
                cwd=self._shell.home,
                env=self._shell.env,
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        for number, patience in ((signal.SIGTERM, 40), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(patience)
                break
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        if kind is None:
            check_output(" ".join(self._words), self.screen())

    def screen(self) -> str:
        return self._log.read_text(errors="replace").replace("\r\n", "\n")

    def wait_for(self, text: str, limit_s: float) -> str:
        """The screen once a line starts with `text`."""
        deadline = time.monotonic() + limit_s
        while True:
            ended, screen = self.process.poll() is not None, self.screen()
            if any(line.startswith(text) for line in screen.splitlines()):
                return screen
            if ended:
                check_output(self._words[0], screen)
            if ended or time.monotonic() > deadline:
                why = (
                    f"ended with {self.process.returncode}" if ended else f"{limit_s:.0f} s went by"
                )
                raise Failed(f"no {text!r} of {self._words[0]}: {why}\n{screen[-_SHOWN:]}")
            time.sleep(0.2)


_ON_A_TERMINAL = """
import os, pty, signal, sys
pid, screen = pty.fork()
if not pid:
    os.execvp(sys.argv[1], sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
while True:
    try:
        said = os.read(screen, 65536)
    except OSError:
        break
    if not said:
        break
    os.write(1, said)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255)
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def megabytes(path: Path) -> int:
    """Disk space in MiB, as `du -sm` counts it: each file once."""
    seen: dict[tuple[int, int], int] = {}
    for found in [path, *path.rglob("*")]:
        stat = found.lstat()
        seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return -(-sum(seen.values()) // (1 << 20))
