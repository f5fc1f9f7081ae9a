"""`tollhouse tenant request-log`: the receiver of a tenant's records of requests."""

import argparse
from typing import Any

from billing.notices import request_sinks as sinks
from billing.notices.alert_targets import AlertTargets
from gateway.admin.console import (
    CommandContext,
    add_json,
    add_tenant,
    command_context,
    scope_named,
    show,
)


def add_request_log(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    logged = verbs.add_parser(
        "request-log", help="show, set or remove the receiver of records of requests"
    )
    add_tenant(logged)
    logged.add_argument(
        "--url", help="https://host/path, whose signing secret is shown once, or s3://bucket/prefix"
    )
    logged.add_argument(
        "--content", action="store_true", help="also texts, as moderation left them"
    )
    logged.add_argument(
        "--format",
        choices=(sinks.RECORDS, sinks.OTLP),
        default=sinks.RECORDS,
        help="otlp: traces in JSON, for OpenTelemetry collectors and Langfuse",
    )
    logged.add_argument("--sample-percent", type=int, default=100, metavar="N")
    logged.add_argument("--authorization", help="Authorization header that the receiver asks for")
    logged.add_argument("--off", action="store_true", help="log no more requests")
    add_json(logged)
    logged.set_defaults(run=_request_log)


def _request_log(arguments: argparse.Namespace) -> int:
    with command_context() as tools:
        if arguments.url and not sinks.is_bucket(arguments.url):
            AlertTargets(tools.settings.webhook_networks).check([arguments.url])
        shown = _changed(tools, arguments)
    show(shown, as_json=arguments.json, title="request log")
    return 0


def _changed(tools: CommandContext, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of the tenant's request log, changed as the arguments say."""
    with tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        if arguments.url:
            options = sinks.SinkOptions(
                arguments.content,
                arguments.format,
                arguments.sample_percent,
                arguments.authorization,
            )
            made = sinks.set_sink(session, scope, tools.clock, arguments.url, options)
            shown = {
                "url": made.url,
                "content": made.content,
                "format": made.format,
                "sample_percent": made.sample_percent,
            }
            if not made.is_bucket:
                shown["secret"] = made.secret
        else:
            if arguments.off:
                sinks.remove_sink(session, scope, tools.clock)
            sink = sinks.sink_of(session, scope)
            shown = {
                "url": sink.url if sink else None,
                "content": sink.content if sink else False,
                "format": sink.format if sink else None,
                "sample_percent": sink.sample_percent if sink else None,
            }
    return shown
