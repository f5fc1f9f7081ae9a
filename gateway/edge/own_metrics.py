"""The metrics of this gateway: of its process, or of all its processes where it has several."""

import os

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from core import tallies


def registry() -> CollectorRegistry:
    if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return REGISTRY
    tallies.fold_all()
    made = CollectorRegistry()
    MultiProcessCollector(made)  # type: ignore[no-untyped-call]
    return made


def gauges() -> dict[str, list[float]]:
    """By metric, a value for each set of labels."""
    return {
        family.name: [sample.value for sample in family.samples]
        for family in registry().collect()
        if family.type == "gauge"
    }
