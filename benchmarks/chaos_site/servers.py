"""PostgreSQL, Redis and RabbitMQ of one's own, on free ports with data in a folder of their own: these
may be killed (-9) and started again on what they left. Run from the installed programs; root gives
them to the user that their packages made, since PostgreSQL refuses to run as root.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from kombu.connection import Connection

from tests.journeys.deployments import free_port

_START_S = 120.0  # RabbitMQ takes half a minute on a busy machine


@dataclass
class Server:
    """One that runs in the foreground. `start` returns once it answers."""

    folder: Path
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        if self.runs:
            return
        deadline = time.monotonic() + _START_S
        while not self.answers():
            if time.monotonic() > deadline:
                raise SystemExit(f"{type(self).__name__} does not start; see {self.folder}")
            if not self.runs:  # also when what a killed one left is still going away
                self.process = self.launch()
            time.sleep(0.2)

    def kill(self) -> None:
        """-9, with all its children at once: nothing is flushed, nobody is told."""
        if self.process is None or not self.runs:
            return
        for pid in (self.process.pid, *_below(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> None:
        self.kill()

    def launch(self) -> "subprocess.Popen[bytes]":
        raise NotImplementedError

    def answers(self) -> bool:
        raise NotImplementedError


_INITDB_OPTIONS = ["-U", "tollhouse", "-A", "trust", "-E", "UTF8", "--no-sync"]


class Postgres(Server):
    @property
    def address(self) -> str:
        return f"postgresql://tollhouse@127.0.0.1:{self.port}/postgres"

    def launch(self) -> "subprocess.Popen[bytes]":
        programs, user, data = postgres_programs(), _user("postgres"), self.folder / "data"
        assert programs is not None
        if not data.exists():
            _given_to(self.folder, user)
            initdb = [str(programs / "initdb"), "-D", str(data), *_INITDB_OPTIONS]
            subprocess.run(initdb, check=True, user=user, stdout=subprocess.DEVNULL)
        options = {"listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder}
        command: list[str | Path] = [programs / "postgres", "-D", data, "-p", str(self.port)]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        return _run(command, self.folder, user)

    def answers(self) -> bool:
        with contextlib.suppress(psycopg.OperationalError):
            psycopg.connect(self.address, connect_timeout=2).close()
            return True
        return False


class Redis(Server):
    def launch(self) -> "subprocess.Popen[bytes]":
        command = ["redis-server", "--port", str(self.port), "--dir", str(self.folder)]
        return _run([*command, "--save", "", "--appendonly", "yes"], self.folder, None)

    def answers(self) -> bool:
        with socket.socket() as attempt:
            attempt.settimeout(0.5)
            return attempt.connect_ex(("127.0.0.1", self.port)) == 0


@dataclass
class RabbitMQ(Server):
    between: int = field(default_factory=free_port)  # port of the node for other nodes
    names: int = field(default_factory=free_port)  # port of the name server that Erlang asks
    _namer: "subprocess.Popen[bytes] | None" = None

    @property
    def address(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def launch(self) -> "subprocess.Popen[bytes]":
        program = rabbitmq_program()
        assert program is not None
        (self.folder / "plugins").write_text("[].")
        if self._namer is None:  # else the node starts one that outlives it
            namer: list[str | Path] = ["epmd", "-address", "127.0.0.1", "-port", str(self.names)]
            self._namer = _run(namer, self.folder, None)
        own = {
            "HOME": self.folder,
            "ERL_EPMD_PORT": self.names,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"fire{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": self.between,
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOG_BASE": self.folder,
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "plugins",
            "RABBITMQ_CONFIG_FILE": self.folder / "none",
            "RABBITMQ_CONF_ENV_FILE": self.folder / "none.sh",
            "RABBITMQ_PID_FILE": self.folder / "pid",
        }
        return _run([program], self.folder, None, {name: str(what) for name, what in own.items()})

    def answers(self) -> bool:
        with contextlib.suppress(OSError), Connection(self.address, connect_timeout=2) as link:  # type: ignore[no-untyped-call]
            link.connect()
            return True
        return False

    def stop(self) -> None:
        self.kill()
        if self._namer is not None:
            self._namer.kill()
            self._namer.wait(30)


def postgres_programs() -> Path | None:
    """Where initdb and postgres are, if they are installed and may be run."""
    if os.geteuid() == 0 and _user("postgres") is None:
        return None
    places = [Path(found).parent] if (found := shutil.which("initdb")) else []
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((place for place in places if (place / "postgres").exists()), None)


def rabbitmq_program() -> Path | None:
    """The server's own script: the one on Debian's path always takes the packaged user's folders."""
    places = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    if places:
        return places[-1]
    found = shutil.which("rabbitmq-server")
    return Path(found) if found else None


def _run(
    command: list[str | Path], folder: Path, user: str | None, own: dict[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    with (folder / "log.txt").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            user=user,
            env=os.environ | (own or {}),
            process_group=0,
        )


def _user(name: str) -> str | None:
    """Whom root gives the server to; None for everybody else, and where there is no such user."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(name).pw_name
    except KeyError:
        return None


def _given_to(folder: Path, user: str | None) -> None:
    if user is not None:
        shutil.chown(folder, user)


def _below(pid: int) -> list[int]:
    """Processes that it started, and theirs."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *_below(child)]
    return found
