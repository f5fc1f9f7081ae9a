"""`tollhouse picker`: an endpoint picker for inference gateways (Envoy's external processing)."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

from prometheus_client import start_http_server

from core import logs
from core.errors import SettingError
from core.settings import load_settings
from gateway.engines.picker import servers
from gateway.engines.picker.picking import Picker

HELP = "choose the model server of each request for an inference gateway (Envoy ext_proc)"


def configure(parser: argparse.ArgumentParser) -> None:
    pool = parser.add_mutually_exclusive_group(required=True)
    pool.add_argument(
        "--endpoint",
        action="append",
        default=[],
        metavar="IP:PORT",
        help="a model server; repeat it",
    )
    pool.add_argument(
        "--endpoints-file",
        type=Path,
        help="a file with an IP:PORT a line, read again as it changes",
    )
    pool.add_argument(
        "--dns",
        default="",
        metavar="NAME:PORT",
        help="every address of the name: a headless Service",
    )
    parser.add_argument("--listen", default="127.0.0.1:9002", help="address of the gRPC port")
    parser.add_argument(
        "--objective",
        action="append",
        default=[],
        metavar="NAME=PRIORITY",
        help="priority of an objective; below 0, its requests are refused while all servers are full",
    )
    parser.add_argument(
        "--queue-limit",
        type=int,
        default=5,
        help="requests that wait at a server that counts as full",
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", help="interface of /metrics")
    parser.add_argument("--metrics-port", type=int, default=-1, help="port of /metrics; -1: none")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gateway.engines.picker.external_processor import PickerServer

    settings = load_settings()
    logs.configure(settings.log_level, settings.log_format)
    if arguments.queue_limit < 1:
        raise SettingError(
            f"--queue-limit is {arguments.queue_limit}.", next_step="Give 1 or more requests."
        )
    picker = Picker(_members(arguments), _objectives(arguments.objective), arguments.queue_limit)
    if arguments.metrics_port >= 0:
        start_http_server(arguments.metrics_port, arguments.metrics_host)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(picker, arguments.listen, PickerServer))
    return 0


async def _serve(picker: Picker, address: str, make_server: type) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        server = make_server(picker, address)
    except RuntimeError as error:  # gRPC's own, for an address that it cannot bind
        raise SettingError(
            f"The picker cannot listen on {address!r}: {error}.",
            next_step="Give --listen a free address, such as 0.0.0.0:9002.",
        ) from None
    await server.start()
    ready = [each.address for each in picker.servers.ready()]
    sys.stdout.write(json.dumps({"event": "ready", "port": server.port, "servers": ready}) + "\n")
    sys.stdout.flush()
    await stop.wait()
    await server.close()


def _members(arguments: argparse.Namespace) -> servers.Members:
    if arguments.endpoint:
        return servers.fixed(arguments.endpoint)
    if arguments.endpoints_file is not None:
        if not arguments.endpoints_file.is_file():
            raise SettingError(
                f"{arguments.endpoints_file} is not a file.",
                next_step="Give --endpoints-file a file with an IP:PORT a line.",
            )
        return servers.listed_in(arguments.endpoints_file)
    name, colon, port = arguments.dns.rpartition(":")
    if not (colon and name and port.isascii() and port.isdecimal()):
        raise SettingError(f"--dns is {arguments.dns!r}.", next_step="Give NAME:PORT.")
    return servers.resolved(name, int(port))


def _objectives(texts: list[str]) -> dict[str, int]:
    objectives = {}
    for text in texts:
        name, _, priority = text.partition("=")
        digits = priority.removeprefix("-")
        if not (name and digits.isascii() and digits.isdecimal()):
            raise SettingError(
                f"{text!r} is not an objective.", next_step="Give NAME=PRIORITY, such as batch=-1."
            )
        objectives[name] = int(priority)
    return objectives
