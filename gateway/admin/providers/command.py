"""`tollhouse provider`: what a recorded answer of a provider says, and what it counts."""

import argparse
import json
from pathlib import Path
from typing import Any

from core.errors import BadRequest
from gateway.admin.output import add_json, show
from gateway.admin.providers.reconcile import reconcile
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.recordings import NAMES, Recorded, read_recording

HELP = "read recorded answers of providers; compare their usage reports with ours"
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError)


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    parse = verbs.add_parser(
        "parse", help="show the text, tool calls and usage of a recorded answer"
    )
    parse.add_argument(
        "file", type=Path, help="JSON, server-sent events, or an event stream of AWS"
    )
    parse.add_argument(
        "--port", required=True, choices=NAMES, metavar="PROVIDER", help="|".join(NAMES)
    )
    parse.add_argument("--stream", action="store_true", help="the file is a stream of events")
    parse.add_argument("--json", action="store_true", help="as one JSON object")
    parse.set_defaults(run=_parse)
    compare = verbs.add_parser(
        "reconcile",
        help="show what a provider's usage report and ours differ in; exit 1 if they do",
    )
    compare.add_argument("file", help="JSON of OpenAI or Anthropic, by day and model; `-` is stdin")
    compare.add_argument("--provider", required=True, help="as entries of upstreams name it")
    compare.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="ID=ENTRY",
        help="compare by key: the report's api_key_id of an entry; may be repeated",
    )
    compare.add_argument("--all", action="store_true", help="also what is the same")
    add_json(compare)
    compare.set_defaults(run=reconcile)


def _parse(arguments: argparse.Namespace) -> int:
    try:
        data = arguments.file.read_bytes()
    except OSError as error:
        raise BadRequest(f"{arguments.file} cannot be read: {error.strerror}.") from None
    try:
        found = read_recording(arguments.port, data, stream=arguments.stream or None)
    except ReportedError as error:
        raise BadRequest(
            f"The recorded answer is an error of the provider ({error.reported.status}): "
            f"{json.dumps(error.reported.detail)[:500]}",
            next_step="Nothing was generated or is billed.",
        ) from None
    except _MALFORMED as error:
        raise BadRequest(
            f"{arguments.file} is not an answer of {arguments.port}: {error!r}.",
            next_step="Check --port and --stream.",
        ) from None
    show(described(found), as_json=arguments.json, title="recorded answer")
    return 0


_OTHERS = (
    *("audio_input", "image_input", "audio_output", "image_output"),
    *("searches", "tool_calls"),
)


def described(found: Recorded) -> dict[str, Any]:
    split = found.split
    names = ("input", "cache_read", "cache_write", "cache_write_long", "output", "reasoning")
    usage = {name: getattr(split, name) if split is not None else 0 for name in names}
    usage["cache_write"] += usage["cache_write_long"]  # of which
    for name in _OTHERS:
        if split is not None and getattr(split, name):
            usage[name] = getattr(split, name)
    return {
        "text": found.text or found.refusal,
        "tool_calls": [
            {"id": each["id"], "name": each["name"], "arguments": _arguments(each["arguments"])}
            for each in found.calls
        ],
        "reasoning": found.reasoning,
        "stop_reason": found.reason,
        "usage": usage,
    }


def _arguments(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
