"""The door beside its peers: everything on here, nothing on there, one static upstream for all.

    python -m benchmarks.gateway [--peers bare,litellm,portkey,tensorzero|none] [--seconds 8]

Needs nginx and wrk. The figures of two and four workers need Redis (and PostgreSQL) on their
standard local ports: TOLLHOUSE_BENCH_HOME names where the peers' environments are made.
"""

import argparse
import contextlib
import socket
import tempfile
import uuid
from pathlib import Path

from benchmarks.door.load import Rate, run_wrk
from benchmarks.door.mock import CHUNKS, mock
from benchmarks.door.own import MODEL, House, own_house
from benchmarks.door.peers import PEERS, Peer
from benchmarks.report import figure, progress

REDIS = "redis://127.0.0.1:6379/0"


class Bench:
    def __init__(self, home: Path, seconds: float, whole: str, stream: str) -> None:
        self.home = home
        self.seconds = seconds
        self.whole = whole
        self.stream = stream
        self.answers = 0

    def load(self, url: str, key: str, model: str, connections: int, *, stream: bool) -> Rate:
        run_wrk(  # warm
            self.home, url, key, connections=connections, seconds=1, stream=stream, model=model
        )
        rate = run_wrk(
            self.home,
            url,
            key,
            connections=connections,
            seconds=self.seconds,
            stream=stream,
            model=model,
        )
        progress(f"  {connections} connections: {rate}")
        if rate.failed:
            progress(f"  {rate.failed} answers failed: this figure is not to be trusted")
        return rate

    def own(self, house: House, connections: int, *, stream: bool = False) -> Rate:
        return self.load(house.url, house.key, MODEL, connections, stream=stream)

    def peer(self, name: str, connections: int, *, stream: bool = False) -> Rate | None:
        progress(f"{name}, {'streams' if stream else 'whole answers'}")
        try:
            with PEERS[name](self.home, self.stream if stream else self.whole) as peer:
                return self._peer(peer, connections, stream)
        except (OSError, RuntimeError, SystemExit) as error:
            progress(f"  {name} could not be measured: {error}")
            return None

    def _peer(self, peer: Peer, connections: int, stream: bool) -> Rate:
        return self.load(peer.url, "none", peer.model, connections, stream=stream)


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
        many, alone = bench.own(house, 16), bench.own(house, 1)
        _memory(bench, house)
        _audited(house)
    with own_house(bench.home / "stream", bench.stream) as house:
        chunks = bench.own(house, 16, stream=True).per_s * CHUNKS
        _audited(house)
    targets = {"litellm": (18, 28), "portkey": (1.4, 2.3), "bare": (0.4, 0.65)}
    for name, (least, aim) in targets.items():
        rate = bench.peer(name, 16) if name in peers else None
        if rate is not None or not peers:
            _figure("requests_per_s_16", many.per_s, "requests/s", name, rate, least, aim)
    if "portkey" in peers and (other := bench.peer("portkey", 1)) is not None:
        figure("gateway.p50_alone", alone.p50_ms, "ms", False, "portkey", other.p50_ms, 0.77, 1.25)
    streamed = bench.peer("litellm", 16, stream=True) if "litellm" in peers else None
    peer_chunks = streamed.per_s * CHUNKS if streamed else None
    named = "litellm" if streamed else None
    figure("gateway.chunks_per_s", chunks, "chunks/s", True, named, peer_chunks, 30, 60)
    if _answers(6379):
        _workers(bench, many, peers)
    else:
        progress("Redis does not answer on 127.0.0.1:6379: no figures of several workers")


def _workers(bench: Bench, one: Rate, peers: list[str]) -> None:
    settings = {"TOLLHOUSE_REDIS_URL": REDIS}
    with own_house(bench.home / "two", bench.whole, workers=2, settings=settings) as house:
        two = bench.own(house, 32)
        _audited(house)
    rate = bench.peer("tensorzero", 32) if "tensorzero" in peers else None
    _figure("two_workers_requests_per_s", two.per_s, "requests/s", "tensorzero", rate, 0.35, 0.6)
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_postgres())
        if url is None:
            progress("PostgreSQL does not answer on 127.0.0.1:5432: no figure of four workers")
            return
        settings = {**settings, "TOLLHOUSE_DATABASE_URL": url}
        house = stack.enter_context(
            own_house(bench.home / "four", bench.whole, workers=4, settings=settings)
        )
        four = bench.own(house, 64)
        _audited(house)
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
        {"cores": cores},
    )


def _memory(bench: Bench, house: House) -> None:
    """Growth of the resident memory while as many requests again pass, ten times."""
    before = house.resident_kib()
    for _ in range(3):
        bench.own(house, 16)
    growth = (house.resident_kib() - before) / before * 100
    figure("gateway.memory_growth", growth, "%", False, at_least=5, aim=0)


def _audited(house: House) -> None:
    report = house.audit()
    wrong = report["lost"] + report["duplicated"] + report["parked"]
    exact = 0 if report["ledger_error"] in (0, "0") else 1
    figure("gateway.audit_differences", wrong + exact, "differences", False, at_least=0, aim=0)


def _figure(
    name: str, value: float, unit: str, peer: str, rate: Rate | None, least: float, aim: float
) -> None:
    peer_value = rate.per_s if rate is not None else None
    figure(f"gateway.{name}", value, unit, True, peer, peer_value, least, aim)


@contextlib.contextmanager
def _postgres():  # type: ignore[no-untyped-def]
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
    import os

    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    raise SystemExit(main())
