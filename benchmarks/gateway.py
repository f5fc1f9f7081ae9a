"""The gateway beside its peers: every feature on here, none there, one static upstream for all.

    python -m benchmarks.gateway [--peers bare,litellm,portkey,tensorzero|none] [--rounds 5] [--costs]
    python -m benchmarks.gateway --against ../other-checkout [--rounds 5] [--seconds 2]
    python -m benchmarks.gateway --pythons /usr/bin/python3,… [--works known,new] [--rounds 5]

Needs nginx and wrk. The figures of two and four workers need Redis (and PostgreSQL) on their
standard local ports: TOLLHOUSE_BENCH_HOME names where the peers' environments are made.

All stand side by side and are loaded in turn, some seconds each, round after round; a figure is
that of the round with the median ratio (`gateway_load/rounds.py`). Settings say what share of the
processor the host took meanwhile.

With --against only the CPU time of a request is measured, in turn with the gateway of another
checkout: the ratio holds on a machine whose neighbours are busy. With --pythons the same of this
checkout on other interpreters, each beside the one that runs this; Tollhouse is installed in each.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway_load.costs import Costs, Process
from benchmarks.gateway_load.load import Rate
from benchmarks.gateway_load.mock import CHUNKS, mock
from benchmarks.gateway_load.own import ROOT, GatewayProcess, own_gateway
from benchmarks.gateway_load.paced import compare
from benchmarks.gateway_load.peers import PEERS, Peer
from benchmarks.gateway_load.rounds import Contender, beside, rounds
from benchmarks.gateway_load.versions import WORKS, Versions
from benchmarks.report import figure, progress

REDIS = "redis://127.0.0.1:6379/9"
# The memory is looked at after so many requests and again after ten times as many; where the time
# does not allow that, after as many as fit, and the figure's settings say how many they were.
MEMORY_FROM, MEMORY_TO, MEMORY_S, MEMORY_LOAD_S = 20_000, 200_000, 120.0, 10.0


@dataclass(slots=True)
class Bench:
    home: Path
    whole: str  # address of the upstream of whole answers
    stream: str
    peers: list[str]
    count: int  # rounds
    seconds: float  # of each load

    def rounds(self, connections: int, *contenders: Contender | None) -> dict[str, Any]:
        """The settings of a figure made of them."""
        able = [each for each in contenders if each is not None]
        took = rounds(
            self.home, able, count=self.count, seconds=self.seconds, connections=connections
        )
        return {"pinned": True, "rounds": self.count, "stolen_percent": took}

    def peer(self, stack: contextlib.ExitStack, name: str) -> Peer | None:
        """Started; None where it is not wanted or does not start."""
        if name not in self.peers:
            return None
        progress(name)
        try:
            return stack.enter_context(PEERS[name](self.home, self.whole, self.stream))
        except (OSError, RuntimeError, LookupError) as error:
            progress(f"  {name.upper()} COULD NOT BE MEASURED: {error}")
            return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--peers", default=",".join(PEERS), help="of these, or none")
    parser.add_argument("--rounds", type=int, default=5, help="of every comparison")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--costs", action="store_true", help="CPU time of a request alone")
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--pythons", default="", help="other interpreters, by their paths")
    parser.add_argument(
        "--works",
        default=",".join(WORKS),
        help=f"with --against or --pythons: only these of {','.join(WORKS)}",
    )
    chosen = parser.parse_args(arguments)
    peers = [] if chosen.peers == "none" else chosen.peers.split(",")
    wanted = set(chosen.works.split(","))
    unknown = set(peers) - set(PEERS) | wanted - set(WORKS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory(prefix="tollhouse-bench-") as made:
        home = Path(made)
        with mock(home / "upstream") as (whole, stream):
            bench = Bench(home, whole, stream, peers, chosen.rounds, chosen.seconds)
            versions = Versions(Costs(home, chosen.rounds, chosen.seconds), whole, stream)
            if chosen.against is not None:
                versions.against(chosen.against.resolve(), wanted)
                return 0
            if chosen.pythons:
                for python in chosen.pythons.split(","):
                    versions.on_python(python, wanted)
                return 0
            if not chosen.costs:
                _measure(bench)
            _costs(bench)
    return 0


def _costs(bench: Bench) -> None:
    progress("CPU time of a request")
    trusting = {"TOLLHOUSE_TRUSTED_PROXIES": "127.0.0.1"}
    costs = Costs(bench.home, bench.count, bench.seconds)
    with contextlib.ExitStack() as stack:
        home, stream_home = bench.home / "cost", bench.home / "cost-stream"
        whole = stack.enter_context(own_gateway(home, bench.whole, settings=trusting))
        stream = stack.enter_context(own_gateway(stream_home, bench.stream))
        peer, own = bench.peer(stack, "bare"), Process("own", whole.server, whole.pid)
        bare = Process("bare", peer.whole, peer.pid) if peer is not None else None
        costs.whole(own, bare)
        costs.proxied(own)
        costs.streams(Process("own", stream.server, stream.pid))
    for guarded in (True, False):
        compare(bench.home, {"own": ROOT}, bench.count, bench.seconds, guarded=guarded)


def _measure(bench: Bench) -> None:
    progress("our gateway, one worker, everything on")
    with own_gateway(bench.home / "whole", bench.whole) as gateway:
        own = Contender("own", gateway.server)
        _one_worker(bench, own)
        _memory(bench, gateway, own)
        if _answers(6379):
            _two_workers(bench)
            _four_workers(bench, own)
        else:
            progress("Redis does not answer on 127.0.0.1:6379: no figures of several workers")
        _audited(gateway, own)


def _one_worker(bench: Bench, own: Contender) -> None:
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(own_gateway(bench.home / "stream", bench.stream))
        streams = Contender("own", gateway.server, stream=True)
        started = {name: bench.peer(stack, name) for name in ("bare", "portkey", "litellm")}
        found = {name: Contender(name, peer.whole) for name, peer in started.items() if peer}
        details = bench.rounds(16, own, *found.values())
        for name, least, aim in (("litellm", 22, 32), ("portkey", 1.8, 2.5), ("bare", 0.6, 0.9)):
            _rate(
                "requests_per_s_16",
                own,
                found.get(name),
                name,
                least=least,
                aim=aim,
                details=details,
            )
        portkey = found.get("portkey")
        details = bench.rounds(1, own, portkey)
        p50 = beside(own, portkey, lambda rate: rate.p50_ms)
        if p50 is not None:
            figure(
                "gateway.p50_alone",
                p50[0],
                "ms",
                False,
                "portkey",
                p50[1],
                at_least=1.2,
                aim=1.6,
                settings=details,
            )
        litellm = started["litellm"]
        theirs = None
        if litellm is not None and litellm.stream is not None:
            theirs = Contender("litellm", litellm.stream, stream=True)
        details = bench.rounds(16, streams, theirs)
        chunks = beside(streams, theirs, lambda rate: rate.per_s * CHUNKS)
        if chunks is not None:
            name = "gateway.chunks_per_s"
            figure(
                name,
                chunks[0],
                "chunks/s",
                True,
                "litellm",
                chunks[1],
                at_least=60,
                aim=100,
                settings=details,
            )
        _audited(gateway, streams)


def _two_workers(bench: Bench) -> None:
    progress("our gateway, two workers on Redis")
    settings = {"TOLLHOUSE_REDIS_URL": REDIS}
    with contextlib.ExitStack() as stack:
        gateway = stack.enter_context(
            own_gateway(bench.home / "two", bench.whole, workers=2, settings=settings)
        )
        two, peer = Contender("own", gateway.server), bench.peer(stack, "tensorzero")
        theirs = Contender("tensorzero", peer.whole) if peer is not None else None
        details = bench.rounds(16, two, theirs)
        _rate(
            "two_workers_requests_per_s",
            two,
            theirs,
            "tensorzero",
            least=0.35,
            aim=0.5,
            details=details,
        )
        _audited(gateway, two)


def _four_workers(bench: Bench, one: Contender) -> None:
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(_postgres())
        if url is None:
            progress("PostgreSQL does not answer on 127.0.0.1:5432: no figure of four workers")
            return
        progress("our gateway, four workers on Redis and PostgreSQL")
        settings = {"TOLLHOUSE_REDIS_URL": REDIS, "TOLLHOUSE_DATABASE_URL": url}
        gateway = stack.enter_context(
            own_gateway(bench.home / "four", bench.whole, workers=4, settings=settings)
        )
        four = Contender("four workers", gateway.server)
        cores = min(4, _cores())
        details = bench.rounds(32, four, one) | {"cores": cores}
        found = beside(four, one, _per_s)
        if found is not None:
            name, peer = "gateway.four_workers_per_core", "one worker, embedded"
            rate = found[0] / cores
            figure(
                name,
                rate,
                "requests/s",
                True,
                peer,
                found[1],
                at_least=0.6,
                aim=0.8,
                settings=details,
            )
        _audited(gateway, four)


def _loaded(bench: Bench, own: Contender, answers: int, longest_s: float) -> bool:
    """Until it has given so many answers, or for so long; False where a load failed."""
    own.connections = 16
    spent = 0.0
    while own.answers < answers and spent < longest_s:
        if own.load(bench.home, MEMORY_LOAD_S) is None:
            return False
        spent += MEMORY_LOAD_S
    return True


def _memory(bench: Bench, gateway: GatewayProcess, own: Contender) -> None:
    """Growth of the resident memory from MEMORY_FROM answers to MEMORY_TO."""
    if not _loaded(bench, own, MEMORY_FROM, MEMORY_S):
        return
    begun, before = own.answers, gateway.resident_kib()
    if not _loaded(bench, own, MEMORY_TO, MEMORY_S):
        return
    growth = (gateway.resident_kib() - before) / before * 100
    details = {
        "from_requests": begun,
        "to_requests": own.answers,
        "resident_kib": before,
        "pinned": True,
    }
    figure(
        "gateway.memory_growth", growth, "%", False, None, None, at_least=5, aim=0, settings=details
    )


def _audited(gateway: GatewayProcess, own: Contender) -> None:
    """The chain is whole, and every answer has its usage event."""
    report = gateway.audit()
    wrong = report["lost"] + report["duplicated"] + report["parked"]
    exact = 0 if report["ledger_error"] in (0, "0") else 1
    figure("gateway.audit_differences", wrong + exact, "differences", False, at_least=0, aim=0)
    events = gateway.events()
    # The warm-up of the start has an event too; a load's end cuts off what is in flight.
    missing = max(0, own.answers - events) + max(0, events - own.answers - own.cut_off - 2 * _CREW)
    details = {"answers": own.answers, "events": events, "cut_off_at_most": own.cut_off}
    figure(
        "gateway.answers_without_event",
        missing,
        "answers",
        False,
        None,
        None,
        at_least=0,
        aim=0,
        settings=details,
    )


_CREW = 4  # workers that warm up at a start


def _rate(
    name: str,
    own: Contender,
    peer: Contender | None,
    peer_name: str,
    *,
    least: float,
    aim: float,
    details: dict[str, Any],
) -> None:
    found = beside(own, peer, _per_s)
    if found is not None:
        title = f"gateway.{name}"
        figure(
            title,
            found[0],
            "requests/s",
            True,
            peer_name,
            found[1],
            at_least=least,
            aim=aim,
            settings=details,
        )


def _per_s(rate: Rate) -> float:
    return rate.per_s


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
