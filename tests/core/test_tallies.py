"""Tallies against prometheus_client's own metrics, which count one by one."""

import subprocess
import sys
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from core.tallies import TallyCounter, TallyGauge, TallyHistogram

BUCKETS = (0.001, 0.01, 0.1, 1.0)
KINDS = ((Counter, Gauge, Histogram), (TallyCounter, TallyGauge, TallyHistogram))
# What is counted, with reads between the counts.
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("count"), st.integers(0, 9)),
        st.tuples(st.sampled_from(("up", "down")), st.integers(1, 3)),
        # Binary fractions, whose sums are exact in any order; bounds of buckets among them.
        st.tuples(st.just("seconds"), st.sampled_from((0.0, 0.25, 0.5, 1.0, 2.0, 0.015625))),
        st.tuples(st.just("read"), st.just(0)),
    )
)


@given(ACTS)
def test_a_scrape_shows_what_prometheus_own_metrics_would(acts: list[tuple[str, float]]) -> None:
    pages = []
    for counter_kind, gauge_kind, histogram_kind in KINDS:
        registry = CollectorRegistry()
        counter = counter_kind("requests", "…", ["status"], registry=registry)
        gauge = gauge_kind("running", "…", registry=registry)
        times = histogram_kind("seconds", "…", ["route"], registry=registry, buckets=BUCKETS)
        for what, amount in acts:
            if what == "count":
                counter.labels("200").inc(amount)
            elif what == "up":
                gauge.inc(amount)
            elif what == "down":
                gauge.dec(amount)
            elif what == "seconds":
                times.labels("/").observe(amount)
            else:
                generate_latest(registry)
        lines = generate_latest(registry).decode().splitlines()
        pages.append([line for line in lines if "_created" not in line])
    assert pages[0] == pages[1]


_SHARED = """
import sys
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from core.tallies import TallyCounter, TallyGauge, TallyHistogram, fold_all
counter = TallyCounter("requests", "…", ["status"])
gauge = TallyGauge("running", "…", multiprocess_mode="livesum")
times = TallyHistogram("seconds", "…", buckets=(0.5, 1.0))
for number in range(5):
    counter.labels("200").inc()
    gauge.inc()
    times.observe(0.25)
gauge.dec(2)
def page():
    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return generate_latest(registry).decode()
assert 'requests_total{status="200"} 5.0' not in page()
fold_all()
fold_all()
sys.stdout.write(page())
"""


def test_processes_that_share_metrics_show_what_was_folded(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SHARED],
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    for line in (
        'requests_total{status="200"} 5.0',
        "running 3.0",
        'seconds_bucket{le="0.5"} 5.0',
        "seconds_sum 1.25",
    ):
        assert line in done.stdout.splitlines()
