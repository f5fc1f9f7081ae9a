"""A thread for what can be done while the loop's thread is in compiled code.

A step hands it one job and takes the job back if it has not begun. A ThreadPoolExecutor's locks would
take a third of the time that the job spares the loop's thread.
"""

from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from weakref import finalize

_PATIENCE_S = 10.0  # with a last job


class Job:
    """Work that one thread does, the first that claims it. Its names are those of a Future."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._claimed, self._running = Lock(), Lock()
        self._running.acquire()
        self._done = False
        self._failure: BaseException | None = None

    def run(self) -> None:
        if not self.cancel():
            return
        try:
            self._work()
        except BaseException as error:  # the thread that waits for the result raises it
            self._failure = error
        self._done = True
        self._running.release()

    def cancel(self) -> bool:
        """Whether it has not begun, and never will."""
        return self._claimed.acquire(blocking=False)

    def done(self) -> bool:
        return self._done

    def exception(self) -> BaseException | None:
        """Of a job that is done."""
        return self._failure

    def wait(self, patience_s: float | None) -> None:
        """Until it is done, or for as long as `patience_s`. One thread at a time."""
        seconds = -1 if patience_s is None else patience_s
        if not self._done and self._running.acquire(timeout=seconds):
            self._running.release()


class Beside:
    """The thread. It ends with this object and before the process, not in the middle of a job."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = Thread(target=_run, args=(self._jobs,), name=name, daemon=True)
        finalize(self, _end, self._jobs, self._thread)

    def submit(self, work: Callable[[], None]) -> Job:
        job = Job(work)
        self._jobs.put(job)
        if self._thread.ident is None:
            self._thread.start()
        return job


def _run(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # what it refers to may end with its step


def _end(jobs: "SimpleQueue[Job | None]", thread: Thread) -> None:
    jobs.put(None)
    if thread.is_alive() and thread is not current_thread():
        thread.join(_PATIENCE_S)
