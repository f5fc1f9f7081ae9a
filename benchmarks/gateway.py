"""The door beside its peers: everything on here, nothing on there, one static upstream for all.

    python -m benchmarks.gateway [--peers bare,litellm,portkey,tensorzero|none] [--seconds 8]

Needs nginx and wrk. The figures of two and four workers need Redis (and PostgreSQL) on their
standard local ports: TOLLHOUSE_BENCH_HOME names where the peers' environments are made.

Every server is asked once, and its answer compared with the upstream's, before it is loaded. What
does not start, answers wrongly or fails under the load has no figure; stderr says why.

Our gateway processes keep to a core each (TOLLHOUSE_PIN_WORKERS), as in production on a machine of
their own; the figures' settings say so. Peers run as they come.
"""

import argparse
import contextlib
import os
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from benchmarks.door.load import Rate, Server, check, run_wrk
from benchmarks.door.mock import CHUNKS, STREAM_TEXT, WHOLE_TEXT, mock
from benchmarks.door.own import House, own_house
from benchmarks.door.peers import PEERS
from benchmarks.report import figure, progress

PINNED = {"pinned": True}
REDIS = "redis://127.0.0.1:6379/9"
# The memory is looked at after so many requests and again after ten times as many; where the time
# does not allow that, after as many as fit, and the figure's settings say how many they were.
MEMORY_FROM, MEMORY_TO, MEMORY_LOADS = 20_000, 200_000, 9


class Bench:
    def __init__(self, home: Path, seconds: float, whole: str, stream: str) -> None:
        self.home = home
        self.seconds = seconds
        self.whole = whole
        self.stream = stream
        self.answers = 0  # 2xx, since `counted` was last asked
        self.in_flight = 0  # that the ends of loads may have cut off meanwhile

    def load(
        self, server: Server, connections: int, *, stream: bool = False, seconds: float = 0.0
    ) -> Rate | None:
        """Checked, warmed and loaded; None where any of it failed."""
        check(server, STREAM_TEXT if stream else WHOLE_TEXT, stream=stream)
        self.answers += 1
        rates = [
            run_wrk(self.home, server, connections=connections, seconds=each, stream=stream)
            for each in (1.0, seconds or self.seconds)
        ]
        self.answers += sum(rate.answers - rate.failed for rate in rates)
        self.in_flight += connections * len(rates)
        progress(f"  {connections} connections: {rates[1]}")
        if rates[1].answers == 0 or any(rate.failed for rate in rates):
            progress("  NO ANSWER, OR SOME FAILED: THIS LOAD GIVES NO FIGURE")
            return None
        return rates[1]

    def counted(self) -> tuple[int, int]:
        """(answers, of which the ends of loads may have cut off so many more)"""
        found = self.answers, self.in_flight
        self.answers = self.in_flight = 0
        return found

    def peer(self, name: str, *loads: tuple[int, bool]) -> list[Rate | None]:
        """One rate for each load (connections, stream); None where it could not be measured."""
        progress(name)
        rates: list[Rate | None] = []
        try:
            with PEERS[name](self.home, self.whole, self.stream) as peer:
                for connections, stream in loads:
                    server = peer.stream if stream else peer.whole
                    assert server is not None
                    rates.append(self.load(server, connections, stream=stream))
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            progress(f"  {name.upper()} COULD NOT BE MEASURED: {error}")
        self.counted()
        return rates + [None] * (len(loads) - len(rates))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help="of these, or none")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each load")
    chosen = parser.parse_args(arguments)
    peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    unknown = set(peers) - set(PEERS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as made:
        home = Path(made)
        with mock(home / "upstream") as (whole, stream):
            _measure(Bench(home, chosen.seconds, whole, stream), peers)
    return 0


def _measure(bench: Bench, peers: list[str]) -> None:
    progress("our house, one worker, everything on")
    with own_house(bench.home / "whole", bench.whole) as house:
        many, alone = bench.load(house.server, 16), bench.load(house.server, 1)
        _memory(bench, house)
        _audited(bench, house)
    with own_house(bench.home / "stream", bench.stream) as house:
        streams = bench.load(house.server, 16, stream=True)
        _audited(bench, house)
    wanted = {
        "bare": ((16, False),),
        "portkey": ((16, False), (1, False)),
        "litellm": ((16, False), (16, True)),
    }
    found = {
        name: bench.peer(name, *loads) if name in peers else [None] * len(loads)
        for name, loads in wanted.items()
    }
    for name, least, aim in (("litellm", 18, 28), ("portkey", 1.4, 2.3), ("bare", 0.4, 0.65)):
        _figure("requests_per_s_16", many, name, found[name][0], least, aim)
    if alone is not None:
        other = found["portkey"][1]
        p50 = other.p50_ms if other else None
        figure("gateway.p50_alone", alone.p50_ms, "ms", False, "portkey", p50, 0.77, 1.25, PINNED)
    if streams is not None:
        other = found["litellm"][1]
        theirs = other.per_s * CHUNKS if other else None
        chunks = streams.per_s * CHUNKS
        name = "gateway.chunks_per_s"
        figure(name, chunks, "chunks/s", True, "litellm", theirs, 30, 60, PINNED)
    if _answers(6379):
        _workers(bench, many, peers)
    else:
        progress("Redis does not answer on 127.0.0.1:6379: no figures of several workers")


def _workers(bench: Bench, one: Rate | None, peers: list[str]) -> None:
    settings = {"TOLLHOUSE_REDIS_URL": REDIS}
    progress("our house, two workers on Redis")
    with own_house(bench.home / "two", bench.whole, workers=2, settings=settings) as house:
        two = bench.load(house.server, 16)
        _audited(bench, house)
    rate = bench.peer("tensorzero", (16, False))[0] if "tensorzero" in peers else None
    _figure("two_workers_requests_per_s", two, "tensorzero", rate, 0.35, 0.6)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_postgres())
        if url is None:
            progress("PostgreSQL does not answer on 127.0.0.1:5432: no figure of four workers")
            return
        progress("our house, four workers on Redis and PostgreSQL")
        settings = {**settings, "TOLLHOUSE_DATABASE_URL": url}
        house = stack.enter_context(
            own_house(bench.home / "four", bench.whole, workers=4, settings=settings)
        )
        four = bench.load(house.server, 32)
        _audited(bench, house)
    if four is None or one is None:
        return
    cores = min(4, _cores())
    figure(
        "gateway.four_workers_per_core",
        four.per_s / cores,
        "requests/s",
        True,
        "one worker, embedded",
        one.per_s,
        0.6,
        0.8,
        {"cores": cores, **PINNED},
    )


def _memory(bench: Bench, house: House) -> None:
    """Growth of the resident memory while ten times as many requests pass as before."""
    speed, longest = 1000.0, MEMORY_LOADS * bench.seconds
    spent, before, begun = 0.0, 0, bench.answers
    while not before or (bench.answers < MEMORY_TO and spent < longest):
        wanted = (MEMORY_FROM if not before else MEMORY_TO) - bench.answers
        seconds = min(max(2.0, wanted / speed), 15.0)
        rate = bench.load(house.server, 16, seconds=seconds)
        if rate is None:
            return
        speed = rate.per_s
        spent += seconds + 1
        if not before and (bench.answers >= MEMORY_FROM or spent > longest / 4):
            before, begun = house.resident_kib(), bench.answers
    growth = (house.resident_kib() - before) / before * 100
    told = {"from_requests": begun, "to_requests": bench.answers, "resident_kib": before, **PINNED}
    figure("gateway.memory_growth", growth, "%", False, None, None, 5, 0, told)


def _audited(bench: Bench, house: House) -> None:
    """The chain is whole, and every answer has its usage event."""
    report = house.audit()
    wrong = report["lost"] + report["duplicated"] + report["parked"]
    exact = 0 if report["ledger_error"] in (0, "0") else 1
    figure("gateway.audit_differences", wrong + exact, "differences", False, at_least=0, aim=0)
    answers, cut_off = bench.counted()
    events = house.events()
    # The warm-up of the start has an event too; a load's end cuts off what is in flight.
    missing = max(0, answers - events) + max(0, events - answers - cut_off - 2 * _CREW)
    told = {"answers": answers, "events": events, "cut_off_at_most": cut_off}
    figure("gateway.answers_without_event", missing, "answers", False, None, None, 0, 0, told)


_CREW = 4  # workers that warm up at a start


def _figure(
    name: str, own: Rate | None, peer: str, rate: Rate | None, least: float, aim: float
) -> None:
    if own is not None:
        theirs = rate.per_s if rate is not None else None
        figure(f"gateway.{name}", own.per_s, "requests/s", True, peer, theirs, least, aim, PINNED)


@contextlib.contextmanager
def _postgres() -> Iterator[str | None]:
    import psycopg

    server, name = "postgresql://root@127.0.0.1:5432", f"tollhouse_bench_{uuid.uuid4().hex[:8]}"
    try:
        admin = psycopg.connect(f"{server}/postgres", autocommit=True, connect_timeout=3)
    except psycopg.Error:
        yield None
        return
    with admin:
        admin.execute(f"create database {name}")
        try:
            yield f"{server}/{name}"
        finally:
            admin.execute(f"drop database if exists {name} with (force)")


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


def _cores() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
