"""A process of the race tests: `python counter_worker.py burst|hold <url> <prefix> <attempts>`."""

import asyncio
import os
import sys

from core.counters import BucketGrant, BucketRequest, Cap, Hold, Slot, Take
from core.counters_redis import RedisCounters

CAPACITY = 700
CAP = 50_000


def _bucket_request(number: int) -> BucketRequest:
    return BucketRequest(
        "org_race",
        f"req_{os.getpid()}_{number}",
        60_000,
        (Take("requests", CAPACITY, 86_400_000, 1, 1), Take("wide", 10**9, 60_000, 50, 50)),
        hold=Hold(60, 60, (Cap("budget", CAP, 0),)),
    )


async def burst(counters: RedisCounters, attempts: int) -> int:
    """Admitted among so many attempts, 50 at a time, as fast as it goes."""
    admitted = 0
    for start in range(0, attempts, 50):
        requests = [_bucket_request(start + offset) for offset in range(50)]
        answers = await asyncio.gather(
            *(counters.reserve(bucket_request) for bucket_request in requests)
        )
        admitted += sum(isinstance(answer, BucketGrant) for answer in answers)
    return admitted


async def hold(counters: RedisCounters, lease_ms: int) -> None:
    bucket_request = BucketRequest(
        "org_race", f"req_{os.getpid()}", lease_ms, slots=(Slot("only", 1),)
    )
    assert isinstance(await counters.reserve(bucket_request), BucketGrant)
    sys.stdout.write("held\n")
    sys.stdout.flush()
    while True:
        await asyncio.sleep(lease_ms / 3000)
        await counters.renew("org_race", [bucket_request.id], lease_ms)


async def main() -> None:
    what, url, prefix, number = sys.argv[1:5]
    counters = RedisCounters(url, prefix=prefix, timeout_s=20)
    if what == "hold":
        await hold(counters, int(number))
    sys.stdin.readline()  # all start together
    sys.stdout.write(f"{await burst(counters, int(number))}\n")
    sys.stdout.flush()
    await counters.close()


if __name__ == "__main__":
    asyncio.run(main())
