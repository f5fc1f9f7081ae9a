"""`tollhouse doctor`: checks every part of the deployment and suggests fixes."""

import argparse
import dataclasses

from core.clock import SystemClock
from core.settings import load_settings
from gateway.admin.output import add_json, say, show
from gateway.cli.doctor import dependencies, packages, storage, tokens
from gateway.cli.doctor.check import Check, Health, Report, good, run_checks

HELP = "check every part of the deployment and suggest fixes"

CHECKS: dict[str, Check] = {
    "settings": lambda settings, _clock: good("every TOLLHOUSE_ variable is valid"),
    "extras": packages.extras,
    "classifier": packages.classifier,
    "interpreter": packages.interpreter,
    "data directory": storage.data_directory,
    "database": storage.database,
    "replica": storage.replica,
    "archive": storage.archive,
    "clock": storage.clock_skew,
    "counters": dependencies.counters,
    "queue": dependencies.broker,
    "stream": dependencies.stream,
    "model": dependencies.model,
    "upstreams": dependencies.upstreams,
    "payments": dependencies.payments,
    "payment queue": dependencies.queue,
    "spool": storage.spools,
    "tasks": storage.tasks,
    "history": storage.history,
    "erasures": storage.erasures,
    "operator token": tokens.operator_token,
    "failed items": storage.failed_items,
    "exports": storage.exports,
    "port": dependencies.port,
}


def configure(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Exit status 0 if nothing is bad, else 1. Invalid settings are reported before any check runs."""
    reports = list(run_checks(CHECKS, load_settings(), SystemClock()))
    broken = [report for report in reports if report.finding.health is Health.BAD]
    if arguments.json:
        parts = [report.as_json() for report in reports]
        show({"healthy": not broken, "parts": parts}, as_json=True)
        return 1 if broken else 0
    show([{"part": r.part, **dataclasses.asdict(r.finding)} for r in reports], as_json=False)
    say(_summary(reports))
    return 1 if broken else 0


def _summary(reports: list[Report]) -> str:
    for health, words in ((Health.BAD, "These checks failed"), (Health.WARN, "These need a look")):
        parts = [report.part for report in reports if report.finding.health is health]
        if parts:
            return f"{words}: {', '.join(parts)}."
    return "Everything in use works."
