"""Which extras and which extension of the distribution are installed here."""

import platform
import sys
import sysconfig
from collections.abc import Mapping
from importlib.util import find_spec

from core.clock import Clock
from core.settings import Settings
from gateway.cli.doctor.check import Finding, good, warn
from moderation.classifiers.compiled import is_compiled

# An extra and the package that shows that it is installed.
EXTRAS = {
    "aws": "botocore",
    "clickhouse": "clickhouse_connect",
    "engine": "torch",
    "gpu": "triton",
    "kafka": "confluent_kafka",
    "nats": "nats",
    "pdf": "weasyprint",
    "parquet": "pyarrow",
    "picker": "grpc",
    "s3": "boto3",
    "stripe": "stripe",
    "tracing": "opentelemetry.sdk",
    "vertex": "google.auth",
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


# Linux distributions optimise their own Python without saying so in its configuration.
_DISTRIBUTIONS = ("/usr",)


def interpreter(_settings: Settings, _clock: Clock) -> Finding:
    return running()


def running() -> Finding:
    build = {**sysconfig.get_config_vars(), "prefix": sys.base_prefix}
    return judge(platform.python_version(), build)


def judge(version: str, build: Mapping[str, object]) -> Finding:
    """`build` is what `sysconfig.get_config_vars()` returns."""
    options = str(build.get("CONFIG_ARGS") or "")
    if "--enable-optimizations" in options or build.get("prefix") in _DISTRIBUTIONS:
        return good(f"Python {version}, built with profile-guided optimisation")
    return warn(
        f"Python {version} was built without profile-guided optimisation (--enable-optimizations)",
        "Use the Python of the distribution, of the image in deploy/ or of python.org: "
        "a request then takes about a tenth less processor time.",
    )
