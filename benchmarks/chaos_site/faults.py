"""What strikes, when, and on whom: decided by a seed and the number of the round alone."""

import contextlib
import random
import re
import resource
import signal
import threading
from dataclasses import dataclass

from benchmarks.chaos_site.site import SMALL_DISKS, Site, later, send
from tests.small_disk import fill, free

USUAL_S = 2.0  # of a pause, a stall, an outage or a full disk
_LONG_EVERY = 10  # rounds
PROCESSES = ("gateway0", "gateway1", "engine0", "engine1", "worker0", "worker1", "redis")
SERVERS = ("postgres", "rabbitmq")  # killed where they are the site's own
KINDS = (
    *(("kill", part) for part in SERVERS),
    *((act, part) for part in PROCESSES for act in ("kill", "pause")),
    *(("restart", part) for part in ("gateway0", "engine0", "worker0")),
    *((act, part) for part in ("database", "queue") for act in ("cut", "stall", "outage")),
    ("fill", "spool"),
    *(("fill", part) for part in SMALL_DISKS),
)
_FULL = 1  # bytes that a file of the gateway may have while its disk is full


@dataclass(frozen=True)
class Fault:
    after_s: float
    act: str  # kill | pause | restart | cut | stall | outage | fill
    part: str  # one of PROCESSES, SERVERS or SMALL_DISKS | database | queue | spool
    for_s: float = USUAL_S  # where it ends by itself

    def __str__(self) -> str:
        long = f" for {self.for_s} s" if self.for_s > USUAL_S else ""
        return f"{self.after_s} s {self.act} {self.part}{long}"


def plan(seed: int, number: int, only: str = "", longest_s: float = USUAL_S) -> list[Fault]:
    """One to three faults. The first goes through all kinds in turn, so that no kind is missed, or
    through those whose words match the pattern `only`. In one round of ten they last up to
    `longest_s`, and the first is an outage of the database.
    """
    chance = random.Random(f"{seed}-{number}")
    first = [kind for kind in KINDS if re.search(only, " ".join(kind))]
    chosen = [first[(number + seed) % len(first)]]
    chosen += [chance.choice(KINDS) for _ in range(chance.randint(0, 2))]
    long = longest_s > USUAL_S and number % _LONG_EVERY == _LONG_EVERY - 1
    if long and not only:
        chosen[0] = ("outage", "database")
    faults = [
        Fault(
            round(chance.uniform(0.2, 2.5), 2),
            *each,
            round(chance.uniform(USUAL_S, longest_s), 1) if long else USUAL_S,
        )
        for each in chosen
    ]
    return sorted(faults, key=lambda fault: fault.after_s)


def strike(site: Site, fault: Fault) -> threading.Timer | None:
    """Do it; the timer, if there is one, ends it."""
    if fault.part in site.proxies:
        proxy = site.proxies[fault.part]
        {"cut": proxy.cut, "stall": proxy.stall, "outage": proxy.down}[fault.act]()
        return None if fault.act == "cut" else later(fault.for_s, proxy.up)
    if fault.act == "kill" and fault.part in site.servers:
        site.servers[fault.part].kill()
        return None
    if fault.part in SMALL_DISKS:
        if fault.part not in site.small_disks:
            return None  # the site has said so
        fill(site.disk(fault.part))
        return later(fault.for_s, lambda: free(site.disk(fault.part)))
    pid = site.pids().get("gateway0" if fault.act == "fill" else fault.part)
    if pid is None:
        return None  # an earlier fault of the round ended it, or it is a server of others
    if fault.act == "fill":
        _limit(pid, _FULL)
        return later(fault.for_s, lambda: _limit(pid, resource.RLIM_INFINITY))
    if fault.act == "pause":
        site.paused.add(pid)
        send(pid, signal.SIGSTOP)
        return later(fault.for_s, lambda: send(pid, signal.SIGCONT))
    send(pid, signal.SIGKILL if fault.act == "kill" else signal.SIGTERM)
    return None


def _limit(pid: int, size: int) -> None:
    """What a full disk does to a process, without filling one: its files cannot grow. For who may not
    mount a file system, and it strikes the gateway's open files alone."""
    with contextlib.suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
