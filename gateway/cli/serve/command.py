"""`tollhouse serve`: the gateway and its engines on this machine, until Ctrl-C or SIGTERM."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from core import collector, logs
from core.clock import SystemClock
from core.data_dir import make_data_dir, private_files
from core.database import Database
from core.extras import require
from core.settings import Settings, load_settings
from core.tenants.operator import operator_token
from gateway.admission.counters import make_counters
from gateway.catalog.upstreams import read_upstreams
from gateway.cli.serve import numpy_threads
from gateway.edge import cpu_affinity
from gateway.edge.listening import listen, listen_for_metrics, url_of

HELP = "start the gateway, with a local engine unless TOLLHOUSE_UPSTREAMS names others"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (TOLLHOUSE_HOST)")
    parser.add_argument("--port", type=int, help="port; 0 takes a free one (TOLLHOUSE_PORT)")
    parser.add_argument("--workers", type=int, help="gateway processes (TOLLHOUSE_WORKERS)")
    parser.add_argument("--data-dir", type=Path, help="data directory (TOLLHOUSE_DATA_DIR)")
    parser.add_argument(
        "--model", help="directory, .gguf file, hub id or short name (TOLLHOUSE_MODEL)"
    )
    parser.add_argument(
        "--draft-model",
        help="smaller model of the same tokenizer that guesses tokens (TOLLHOUSE_DRAFT_MODEL)",
    )
    parser.add_argument(
        "--draft-heads",
        help="folder of heads that guess tokens, auto or none (TOLLHOUSE_DRAFT_HEADS)",
    )
    parser.add_argument(
        "--batch-invariant", action=argparse.BooleanOptionalAction, default=None,
        help="answers with the same bits whatever else is in the batch (TOLLHOUSE_BATCH_INVARIANT)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with private_files():
        return _serve(arguments)


def _serve(arguments: argparse.Namespace) -> int:
    names = ("host", "port", "workers", "data_dir", "model", "draft_model", "draft_heads",
             "batch_invariant")  # fmt: skip
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    settings = load_settings(**given)
    logs.configure(settings.log_level, settings.log_format)
    if settings.pin_workers and settings.workers == 1:
        cpu_affinity.pin_to_core(0)
    with collector.paused():
        numpy_threads.load_numpy()

    if not settings.upstreams:
        require(
            "torch", "engine", "A local engine", instead="or name engines in TOLLHOUSE_UPSTREAMS"
        )
    # What can be refused comes first: the gateway itself takes seconds to import.
    read_upstreams(settings.upstreams)
    make_counters(settings, SystemClock())
    listener = listen(settings)
    url = url_of(listener, settings.host)
    metrics_listener = listen_for_metrics(settings)
    database = Database(settings.effective_database_url)
    try:
        database.ping() if settings.database_url else None
        make_data_dir(settings.data_dir)
        served = settings if settings.upstreams else _resolved(settings)

        with collector.paused():
            from gateway.catalog.model_files import served_names
            from gateway.cli.serve import ready, startup
            from gateway.cli.serve.serving import serve_on
            from gateway.cli.serve.workers import serve_with_workers
            from gateway.serving.record import write_record

            startup_info = startup.prepare(settings, database, SystemClock())
    finally:
        database.close()
    urls = ready.Urls(url, url)
    if metrics_listener is not None and settings.metrics_address is not None:
        urls = ready.Urls(url, url_of(metrics_listener, settings.metrics_address[0]))
    given_settings = settings
    with _engines(served) as (settings, engine_s):

        def _ready() -> None:
            route = ready.warm_up(
                url, startup_info, served_names(settings)[0], operator_token(settings)
            )
            write_record(given_settings, url)
            ready.announce(urls, settings, startup_info, engine_s, route)

        if settings.workers > 1:
            return serve_with_workers(listener, settings, _ready, metrics_listener)
        serve_on(listener, settings, metrics_listener=metrics_listener, ready=_ready)
    return 0


def _resolved(settings: Settings) -> Settings:
    from gateway.catalog.model_files import resolved

    return resolved(settings)


@contextlib.contextmanager
def _engines(settings: Settings) -> Iterator[tuple[Settings, float | None]]:
    """The settings with `upstreams` set, and the seconds that local engines took to start."""
    if settings.upstreams:
        yield settings, None
        return
    from gateway.engines.local_engines import LocalEngines

    engines = LocalEngines(settings)
    try:
        engines.start()
        seconds = engines.wait_ready()
        yield settings.model_copy(update={"upstreams": engines.upstreams()}), seconds
    finally:
        engines.stop()
