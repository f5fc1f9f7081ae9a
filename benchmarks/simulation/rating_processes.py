"""Rating workers as processes of their own, which can be killed or stopped in any statement."""

import multiprocessing
import os
import random
import signal
import traceback
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

from sqlalchemy import event

from benchmarks.simulation.faults import Crash, Faults, FaultyDatabase, WorkerFailed
from billing.rating.rating_worker import rate_all
from core.clock import FakeClock

# A process that is killed is replaced by a fork of one that has imported all this.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload([__name__])
_PATIENCE_S = 0.05  # for another worker to share what it has leased
_LONGEST_S = 120
RATED, CRASHED, KILLED, STOPPED, FAILED = "rated", "crashed", "killed", "stopped", "failed"


@dataclass
class Order:
    now: datetime
    most_events: int  # of one transaction
    seed: float  # of the faults of this worker's database
    faulty: bool
    signal_at: int = 0  # the statement before which it is struck; 0 is none
    kills: bool = False  # or stops it


class RatingProcess:
    """A worker that rates when told to; one that was killed is started anew."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._process: ForkServerProcess | None = None
        self._replies: Connection
        self._order: Order | None = None  # that it works on
        self._ended = ""  # how, if that is known before anybody waits for its end

    def begin(self, order: Order) -> None:
        if self._process is None:
            self._replies, theirs = _CONTEXT.Pipe()
            self._process = _CONTEXT.Process(target=_serve, args=(self._url, theirs), daemon=True)
            self._process.start()
            theirs.close()
        self._replies.send(order)
        self._order = order

    def stops(self) -> bool:
        """Whether it stops before it ends; waits until either."""
        said = self._reply()
        self._ended = "" if said == STOPPED else said
        return said == STOPPED

    def go_on(self) -> None:
        assert self._process is not None and self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def finish(self) -> str:
        """Waits until it ends; says how."""
        if self._order is None:
            return RATED
        said = self._ended or self._reply()
        self._order, self._ended = None, ""
        return said

    def is_busy(self) -> bool:
        return self._order is not None

    def end(self) -> None:
        self._order, self._ended = None, ""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._replies.close()
            self._process = None

    def _reply(self) -> str:
        if not self._replies.poll(_LONGEST_S):
            raise WorkerFailed(f"a rating worker does not come back in {_LONGEST_S} s")
        try:
            kind, said = self._replies.recv()
        except (EOFError, ConnectionResetError) as error:
            expected = self._order is not None and self._order.kills
            self.end()
            if not expected:
                raise WorkerFailed("a rating worker died by itself") from error
            return KILLED
        if kind == FAILED:
            raise WorkerFailed(said)
        return str(kind)


def _serve(url: str, orders: Connection) -> None:
    database = FaultyDatabase(url)
    while True:
        try:
            order = orders.recv()
        except EOFError:
            return
        done = _carry_out(database, order, orders)
        database.close()  # each world has a database of its own, and the next one drops this one
        orders.send(done)


def _carry_out(database: FaultyDatabase, order: Order, replies: Connection) -> tuple[str, str]:
    database.faults = Faults(random.Random(order.seed), healed=not order.faulty)
    left = order.signal_at

    def _strike(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0 and order.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if left == 0:
            replies.send((STOPPED, ""))
            os.kill(os.getpid(), signal.SIGSTOP)

    event.listen(database.db_engine, "before_cursor_execute", _strike)
    try:
        events = rate_all(
            database,
            FakeClock(order.now),
            patience_s=_PATIENCE_S,
            most_events=order.most_events,
        )
    except Crash as error:
        return CRASHED, str(error)
    except Exception:
        return FAILED, traceback.format_exc()
    finally:
        event.remove(database.db_engine, "before_cursor_execute", _strike)
    return RATED, str(events)
