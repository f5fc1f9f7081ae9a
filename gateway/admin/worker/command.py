"""`tollhouse worker`: runs scheduled and queued tasks from the broker."""

import argparse
import os
from pathlib import Path

from core import logs
from core.data_dir import make_data_dir, private_files
from core.settings import Settings, load_settings
from gateway.admin.console import command_context
from gateway.admin.output import add_json, show
from gateway.admin.worker.metrics import DIRECTORY, serve_metrics

HELP = "run tasks from the broker: rating, invoices, payments, exports"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--queues", default="", help="queues to serve, separated by commas (default: all)"
    )
    parser.add_argument("--concurrency", type=int, default=2, help="number of processes")
    parser.add_argument(
        "--no-beat", action="store_true", help="do not run the scheduler in this process"
    )
    parser.add_argument(
        "--metrics-host", default="127.0.0.1", help="interface of /metrics and /healthz"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=9101, help="port of /metrics; 0: a free one; -1: none"
    )
    parser.add_argument("--prefix", default="tollhouse", help="prefix of the queues' names")
    parser.add_argument("--dead", action="store_true", help="list tasks that failed permanently")
    parser.add_argument(
        "--replay",
        nargs="*",
        type=int,
        metavar="ID",
        help="run failed tasks again: the given ones, or all",
    )
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.dead or arguments.replay is not None:
        return _dead(arguments)
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)

    port = arguments.metrics_port if arguments.metrics_port >= 0 else None
    served = serve_metrics(
        arguments.metrics_host,
        port,
        prefix=arguments.prefix,
        has_schedule=not arguments.no_beat,
    )
    with private_files(), served as own_queue:
        _work(settings, arguments, own_queue)
    return 0


def _work(settings: Settings, arguments: argparse.Namespace, own_queue: str) -> None:
    # After `serve_metrics`: these import prometheus_client.
    from core.celery_queue import ping_queue, worker_arguments
    from core.queue import QUEUES
    from core.worker_liveness import Times
    from gateway.admin.worker.application import make_worker
    from gateway.metering.streams.consumer import StreamConsumer

    times = Times(os.environ[DIRECTORY]) if own_queue else None
    app = make_worker(settings, arguments.prefix, times=times)
    make_data_dir(settings.data_dir)
    beat = "" if arguments.no_beat else str(Path(settings.data_dir) / "beat-schedule")
    queues = [name for name in arguments.queues.split(",") if name] or list(QUEUES)
    if own_queue:
        app.conf.task_queues = [*app.conf.task_queues, ping_queue(app, own_queue)]
        queues.append(own_queue)
    consumer = StreamConsumer(settings)
    consumer.start()
    try:
        app.worker_main(
            worker_arguments(
                arguments.prefix, queues, concurrency=arguments.concurrency, beat_file=beat
            )
        )
    finally:
        consumer.stop()


def _dead(arguments: argparse.Namespace) -> int:
    from gateway.admin.worker.dead_tasks import list_dead_tasks, replay

    with command_context() as tools:
        if arguments.replay is not None:
            played = replay(tools, arguments.replay, arguments.prefix)
            show({"replayed": played}, as_json=arguments.json)
        else:
            show(list_dead_tasks(tools), as_json=arguments.json, title="dead tasks")
    return 0
