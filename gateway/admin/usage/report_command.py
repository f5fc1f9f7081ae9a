"""`tollhouse usage report`: CloudEvents of usage that Tollhouse did not serve, from a file."""

import argparse
import json
from typing import Any

from billing.usage import reported_usage
from core.errors import BadRequest
from gateway.admin.console.context import command_context
from gateway.admin.console.files import text_of
from gateway.admin.console.output import show

_AT_ONCE = 1000  # events per transaction, as in one call of the API


def report(arguments: argparse.Namespace) -> int:
    """Every event is read before the first is stored. A file that was stored in part can be sent
    again: known events are not stored twice."""
    reports = [_report(number, each) for number, each in _entries(text_of(arguments.file))]
    done = reported_usage.Reported(0, 0)
    with command_context() as tools:
        for first in range(0, len(reports), _AT_ONCE):
            some = reports[first : first + _AT_ONCE]
            with tools.database.transaction() as session:
                done += reported_usage.report(session, tools.clock, some, "operator")
    show(done.describe(), as_json=arguments.json, title="reported")
    return 0


def _entries(text: str) -> list[tuple[int, Any]]:
    """The events with their numbers: of a list, of one event, or of one event per line."""
    try:
        whole = json.loads(text)
    except ValueError:
        lines = enumerate(text.splitlines(), 1)
        return [(number, _json(number, line)) for number, line in lines if line.strip()]
    return list(enumerate(whole if isinstance(whole, list) else [whole], 1))


def _json(number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise _wrong(number, f"it is not JSON: {error}") from None


def _report(number: int, payload: Any) -> reported_usage.Report:
    # FastAPI comes with it: 0.6 s that the other verbs of `usage` would wait for.
    from gateway.admin.usage.routes import report_from

    try:
        return report_from(payload)
    except ValueError as error:
        raise _wrong(number, str(error)) from None


def _wrong(number: int, problem: str) -> BadRequest:
    return BadRequest(
        f"Event {number} of the file is refused: {problem}.",
        next_step="Correct it, then send the whole file again: none of it is stored.",
    )
