"""`tollhouse worker`: takes scheduled and enqueued work from the broker."""

import argparse
from pathlib import Path

from core import logs
from core.celery_queue import QUEUES, worker_arguments
from core.settings import load_settings

HELP = "run tasks from the broker: rating, invoices, payments, exports"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--queues", default=",".join(QUEUES), help="which queues to serve, split by commas"
    )
    parser.add_argument("--concurrency", type=int, default=2, help="processes")
    parser.add_argument("--no-beat", action="store_true", help="leave the schedule to another")
    parser.add_argument("--prefix", default="tollhouse", help="names of the queues begin with it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)

    from gateway.worker import make_worker

    app = make_worker(settings, arguments.prefix)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    beat = "" if arguments.no_beat else str(Path(settings.data_dir) / "beat-schedule")
    queues = [name for name in arguments.queues.split(",") if name]
    app.worker_main(
        worker_arguments(
            arguments.prefix, queues, concurrency=arguments.concurrency, beat_file=beat
        )
    )
    return 0
