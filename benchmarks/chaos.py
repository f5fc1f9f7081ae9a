"""Fire: two gateways, two engines, two workers, PostgreSQL, Redis and RabbitMQ under load, and by a
seeded plan each of them killed (-9), paused, restarted, stalled or cut off, and the disk of a spool
full. After every round everything is brought back and the books are audited. Twelve hours pass between
two rounds (where libfaketime is installed), and all scheduled tasks run during each: days close and
months are invoiced while parts fail.

`python -m benchmarks.chaos --rounds 50` takes twenty minutes on two cores. In one round of ten the
database is out for up to a minute (`--longest`). It starts all parts itself, PostgreSQL, Redis and
RabbitMQ too, from the installed programs with data of their own, and kills them as it does the rest.
Where one is not installed, or with `--given`, it says so, takes what TOLLHOUSE_TEST_POSTGRES (a
database of its own there) and TOLLHOUSE_TEST_RABBITMQ (queues of its own) name, and only cuts and
stalls it by a proxy, since others may use it. The disks of a gateway and of the engines are small file
systems in memory, filled to the last byte, where this user may mount them; `fill spool` limits the size
of a gateway's files. What a round does depends on the seed, its number and `--only` alone:
`--first NUMBER --rounds 1` plays it again.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import func, select

from benchmarks.chaos_site.faults import Fault, plan, strike
from benchmarks.chaos_site.scheduled import run_scheduled_tasks
from benchmarks.chaos_site.site import GATEWAYS, Site, later, site_in, until
from benchmarks.report import figure, progress
from billing.audit import reconcile
from billing.invoicing.tables import Invoice
from billing.rating.rating_worker import rate_all
from billing.usage.tables import ClosedDay
from core.database import Database
from core.settings import load_settings
from gateway.metering.receipt_files import files_and_events
from gateway.metering.spool_watch import spool_counts
from tests.journeys.deployments import StreamResult, streams

STREAMS = 16
TOKENS = 120
HOURS_A_ROUND = 12.0
LONGEST_S = 60.0
RESULTS = Path(__file__).parent / "results" / "chaos.jsonl"


def play(site: Site, faults: list[Fault]) -> dict[str, Any]:
    """One round: load, faults and the scheduled tasks, recovery, audit."""
    site.clock.advance(HOURS_A_ROUND)
    at = time.monotonic()
    timers = [later(fault.after_s, partial(strike, site, fault)) for fault in faults]
    timers.append(later(0.5, partial(run_scheduled_tasks, site)))
    # Until the last pause or outage has ended by itself.
    ends = time.monotonic() + max(fault.after_s + fault.for_s for fault in faults) + 0.2
    seen: list[StreamResult] = []
    while time.monotonic() < ends:
        seen += asyncio.run(_load(site))
        time.sleep(0.2)  # a gateway that is down refuses at once
    for timer in timers:
        timer.join()
    began = time.monotonic()
    until(lambda: _answers(site), 120, "no answer after the faults")
    recovery = time.monotonic() - began
    healed = time.monotonic()
    until(lambda: _settled(site), 120, "requests stay open in a spool")
    settled = time.monotonic()
    return _audit(site) | {
        "answered": sum(each.usage is not None for each in seen),
        "broken": sum(each.usage is None for each in seen),
        "wrong_usage": _wrong(site, seen),
        "recovery_seconds": round(recovery, 2),
        "seconds": {
            "load": round(began - at, 1),
            "settling": round(settled - healed, 1),
            "audit": round(time.monotonic() - settled, 1),
        },
    }


async def _load(site: Site) -> list[StreamResult]:
    share = STREAMS // len(GATEWAYS)
    every = [streams(each, share, max_tokens=TOKENS) for each in site.gateways.values()]
    return [result for results in await asyncio.gather(*every) for result in results]


def _answers(site: Site) -> bool:
    site.start_all()
    return all(
        asyncio.run(streams(each, 1, max_tokens=4))[0].usage is not None
        for each in site.gateways.values()
    )


def _settled(site: Site) -> bool:
    site.start_all()  # one that was told to end may have taken its time
    found = [spool_counts(load_settings(data_dir=site.spool(name))) for name in GATEWAYS]
    return not any(each.running or each.unshipped for each in found)


def _audit(site: Site) -> dict[str, Any]:
    database = Database(site.books)
    rate_all(database, site.clock)
    with database.snapshot() as session:  # workers and scheduled tasks may still write
        report = reconcile.audit(session).as_json()
        files = sorted((site.folder / "engines").glob("receipts-*.log"))
        settings = load_settings(data_dir=site.spool(GATEWAYS[0]))
        receipts = files_and_events(session, settings, site.clock, files)
        closed = session.scalar(select(func.count()).select_from(ClosedDay))
        invoices = session.scalar(select(func.count()).select_from(Invoice))
    database.close()
    return {
        "events": report["steps"]["events"]["count"],
        "lost": report["lost"],
        "duplicated": report["duplicated"],
        "ledger_error": report["ledger_error"],
        "differences": len(report["differences"]) + len(receipts),
        "found": [each["message"] for each in report["differences"]]
        + [each.message for each in receipts],
        "parked": sum(
            spool_counts(load_settings(data_dir=site.spool(name))).parked for name in GATEWAYS
        ),
        "closed_days": closed,
        "invoices": invoices,
    }


def _wrong(site: Site, seen: list[StreamResult]) -> int:
    """Answers whose usage, as the client was told it, is not on the event."""
    with psycopg.connect(site.books, connect_timeout=5) as connection:
        rows = connection.execute(
            "select request_id, input_tokens, output_tokens from usage_events"
            " where request_id = any(%s)",
            ([each.request_id for each in seen],),
        )
        events = {row[0]: (row[1], row[2]) for row in rows}
    return sum(
        events.get(each.request_id)
        != (each.usage["prompt_tokens"], each.usage["completion_tokens"])
        for each in seen
        if each.usage is not None
    )


def is_bad(row: dict[str, Any]) -> bool:
    return bool(row["differences"] or row["wrong_usage"] or row["parked"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="kinds, as 'kill (postgres|redis)', that the rounds begin with"
    )
    parser.add_argument(
        "--longest", type=float, default=LONGEST_S, help="seconds of outages in one round of ten"
    )
    parser.add_argument("--given", action="store_true", help="start no servers but Redis")
    parser.add_argument("--keep", action="store_true", help=f"add the rounds to {RESULTS.name}")
    wanted = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        site_in(Path(folder), own_servers=not wanted.given) as site,
    ):
        for number in range(wanted.first, wanted.first + wanted.rounds):
            faults = plan(wanted.seed, number, wanted.only, wanted.longest)
            row = {"seed": wanted.seed, "round": number} | play(site, faults)
            row["faults"] = [str(each) for each in faults]
            rows.append(row)
            progress(f"{time.monotonic() - began:4.0f} s  {json.dumps(row)}")
            if wanted.keep:
                RESULTS.parent.mkdir(exist_ok=True)
                with RESULTS.open("a") as kept:
                    kept.write(json.dumps(row) + "\n")
    settings = {
        "rounds": len(rows),
        "seed": wanted.seed,
        "struck": sorted({each.partition(" s ")[2] for row in rows for each in row["faults"]}),
        "streams": STREAMS,
        "answered": sum(row["answered"] for row in rows),
        **{name: rows[-1][name] if rows else 0 for name in ("events", "closed_days", "invoices")},
        "seconds": round(time.monotonic() - began, 1),
    }
    bad = sum(map(is_bad, rows))
    figure("chaos.bad_rounds", bad, "rounds", False, at_least=0, aim=0, settings=settings)
    slowest = max((row["recovery_seconds"] for row in rows), default=0.0)
    figure("chaos.slowest_recovery", slowest, "s", False, settings=settings)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
