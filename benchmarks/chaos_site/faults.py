"""What strikes, when, and on whom: decided by a seed and the number of the round alone."""

import contextlib
import random
import re
import resource
import signal
import threading
from dataclasses import dataclass

from benchmarks.chaos_site.site import Site, later, send

LONGEST_S = 2.0  # of a pause, a stall, an outage or a full disk
PROCESSES = ("gateway", "engine0", "engine1", "worker", "redis")
SERVERS = ("postgres", "rabbitmq")  # killed where they are the site's own
KINDS = (
    *(("kill", part) for part in SERVERS),
    *((act, part) for part in PROCESSES for act in ("kill", "pause")),
    *(("restart", part) for part in ("gateway", "engine0", "worker")),
    *((act, part) for part in ("database", "queue") for act in ("cut", "stall", "outage")),
    ("fill", "spool"),
)
_FULL = 1  # bytes that a file of the gateway may have while its disk is full


@dataclass(frozen=True)
class Fault:
    after_s: float
    act: str  # kill | pause | restart | cut | stall | outage | fill
    part: str  # one of PROCESSES or SERVERS | database | queue | spool

    def __str__(self) -> str:
        return f"{self.after_s} s {self.act} {self.part}"


def plan(seed: int, number: int, only: str = "") -> list[Fault]:
    """One to three faults. The first goes through all kinds in turn, so that no kind is missed, or
    through those whose words match the pattern `only`.
    """
    chance = random.Random(f"{seed}-{number}")
    first = [kind for kind in KINDS if re.search(only, " ".join(kind))]
    chosen = [first[(number + seed) % len(first)]]
    chosen += [chance.choice(KINDS) for _ in range(chance.randint(0, 2))]
    return sorted(
        (Fault(round(chance.uniform(0.2, 2.5), 2), *each) for each in chosen),
        key=lambda fault: fault.after_s,
    )


def strike(site: Site, fault: Fault) -> threading.Timer | None:
    """Do it; the timer, if there is one, ends it."""
    if fault.part in site.proxies:
        proxy = site.proxies[fault.part]
        {"cut": proxy.cut, "stall": proxy.stall, "outage": proxy.down}[fault.act]()
        return None if fault.act == "cut" else later(LONGEST_S, proxy.up)
    if fault.act == "kill" and fault.part in site.servers:
        site.servers[fault.part].kill()
        return None
    pid = site.pids().get("gateway" if fault.act == "fill" else fault.part)
    if pid is None:
        return None  # an earlier fault of the round ended it, or it is a server of others
    if fault.act == "fill":
        _limit(pid, _FULL)
        return later(LONGEST_S, lambda: _limit(pid, resource.RLIM_INFINITY))
    if fault.act == "pause":
        site.paused.add(pid)
        send(pid, signal.SIGSTOP)
        return later(LONGEST_S, lambda: send(pid, signal.SIGCONT))
    send(pid, signal.SIGKILL if fault.act == "kill" else signal.SIGTERM)
    return None


def _limit(pid: int, size: int) -> None:
    """What a full disk does to a process, without filling one: its files cannot grow."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
