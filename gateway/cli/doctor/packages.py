"""Which extras and which extension of the distribution are installed here."""

from importlib.util import find_spec

from core.clock import Clock
from core.settings import Settings
from gateway.cli.doctor.check import Finding, good, warn
from moderation.classifiers.compiled import is_compiled

# An extra and the package that shows that it is installed.
EXTRAS = {
    "clickhouse": "clickhouse_connect",
    "engine": "torch",
    "gpu": "triton",
    "kafka": "confluent_kafka",
    "nats": "nats",
    "pdf": "weasyprint",
    "parquet": "pyarrow",
    "s3": "boto3",
    "stripe": "stripe",
    "tracing": "opentelemetry.sdk",
}


def extras(_settings: Settings, _clock: Clock) -> Finding:
    """Never bad: what needs a missing extra says so itself."""
    there = [extra for extra, package in EXTRAS.items() if _installed(package)]
    missing = [extra for extra in EXTRAS if extra not in there]
    found = f"installed: {', '.join(there) or 'none'}"
    return good(f"{found}; not installed: {', '.join(missing)}" if missing else found)


def classifier(_settings: Settings, _clock: Clock) -> Finding:
    if is_compiled():
        return good("the compiled extension computes the scores")
    return warn(
        "numpy computes the scores, which takes about three times as long: the compiled extension "
        "is missing or was built by an earlier version",
        "Install a C compiler (gcc) and install Tollhouse again.",
    )


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
