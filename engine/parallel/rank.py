"""The process of a rank other than the first: `python -m engine.parallel.rank FILE --rank N`."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from engine.backends.compiled.group import Group
from engine.errors import EngineError, RankError
from engine.parallel import rendezvous
from engine.parallel.follower import Answer, Follower
from engine.parallel.rendezvous import Meeting
from engine.parallel.ring import RingReader

LOAD_S = 900.0  # longest wait for another rank that loads its part


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine.parallel.rank", description=__doc__)
    parser.add_argument("file", type=Path, help="which says where the ranks meet")
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first rank ends the others
    try:
        found = rendezvous.read(options.file)
        connection = _connect(found)
    except RankError as error:
        sys.stderr.write(f"rank {options.rank}: {error.message}\n")
        return 1
    try:
        _serve(found, options.rank, connection)
    except EngineError as error:
        _say(connection, {"failed": error.message})
        return 1
    except Exception as error:
        _say(connection, {"failed": f"{type(error).__name__}: {error}"})
        raise
    return 0


def _connect(found: Meeting) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(found.socket)
    except OSError as error:
        raise RankError(f"rank 0 cannot be reached ({error.strerror}): it has ended") from None
    return connection


def _serve(found: Meeting, rank: int, connection: socket.socket) -> None:
    rendezvous.send(connection, {"rank": rank, "digest": found.digest, "pid": os.getpid()})
    records = rendezvous.records(connection)
    welcome = next(records, {"refused": "rank 0 has ended"})
    if "refused" in welcome:
        raise RankError(str(welcome["refused"]))
    config = found.config
    memory, ring = rendezvous.divided(rendezvous.open_memory(found), found.size)
    rendezvous.send(connection, {"opened": rank})
    group = Group(memory, rank, found.size, LOAD_S)
    _end_with(connection)
    from engine.runners.cpu.runner import load_rank

    runner = load_rank(config, group)
    group.exchange("ready")
    group.patience_s = config.stall_s
    lock = threading.Lock()

    def answer(found: Answer) -> None:
        with lock:
            rendezvous.send(connection, {"answer": found})

    reader = RingReader(ring, group.size, group.over_address, rank)
    Follower(runner, group, reader, answer).run()


def _end_with(connection: socket.socket) -> None:
    """Ends this process as soon as the first rank's is gone, whatever it does or waits for."""

    def watch() -> None:
        while connection.recv(1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="first-rank", daemon=True).start()


def _say(connection: socket.socket, record: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the first rank is gone
        rendezvous.send(connection, record)


if __name__ == "__main__":
    sys.exit(main())
