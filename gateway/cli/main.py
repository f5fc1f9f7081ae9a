"""The `tollhouse` command: runs a subcommand and prints an error as its message and the next step.

A subcommand is a module of `COMMANDS` with `HELP` and `configure(parser)`, which sets
`run(arguments) -> int | None`; one that parses its own options has
`main(options)` instead. Exit codes: 0 success, 1 failure, 2 invalid usage.
"""

import argparse
import importlib
import os
import sys
from types import ModuleType

from core import collector
from core.errors import BadRequest, Conflict, NotFound, SettingError, TollhouseError
from gateway.edge import release

COMMANDS = {
    "adapter": "gateway.admin.adapters.command",
    "apply": "gateway.admin.configuration.command",
    "audit": "gateway.admin.audit.command",
    "audit-log": "gateway.admin.audit.log_command",
    "chat": "gateway.cli.chat.command",
    "demo": "gateway.cli.demo.command",
    "doctor": "gateway.cli.doctor.command",
    "engine": "gateway.admin.engines.command",
    "export": "gateway.admin.exports.command",
    "import": "gateway.admin.imports.command",
    "invoice": "gateway.admin.invoices",
    "key": "gateway.admin.keys.command",
    "limit": "gateway.admin.limits.command",
    "member": "gateway.admin.members.command",
    "migrate": "gateway.cli.migrate",
    "model": "gateway.admin.models",
    "money": "gateway.admin.adjustments.command",
    "operator": "gateway.admin.operators.command",
    "payment": "gateway.admin.payments.command",
    "picker": "gateway.cli.picker",
    "plan": "gateway.admin.planning.command",
    "policy": "gateway.admin.policies.command",
    "price": "gateway.admin.prices.command",
    "prompt": "gateway.admin.prompts.command",
    "provider": "gateway.admin.providers.command",
    "recover": "gateway.admin.usage.recover_command",
    "seller": "gateway.admin.taxes.seller_command",
    "serve": "gateway.cli.serve.command",
    "tenant": "gateway.admin.tenants.command",
    "usage": "gateway.admin.usage.command",
    "worker": "gateway.admin.worker.command",
}
USAGE_ERRORS = (SettingError, BadRequest, NotFound, Conflict)


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    try:
        with collector.rarer():
            return _run(args)
    except TollhouseError as error:
        if os.environ.get("TOLLHOUSE_DEBUG"):
            raise
        print(f"tollhouse: {error.message}", file=sys.stderr)
        if error.next_step:
            print(error.next_step, file=sys.stderr)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader closed the pipe; redirect stdout so that the flush at exit does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(args: list[str]) -> int:
    names = command_names()
    if args and args[0] in names:
        module = command_module(args[0])
        if hasattr(module, "main"):
            return int(module.main(args[1:]))
    arguments = _parser(args, names).parse_args(args)
    return int(arguments.run(arguments) or 0)


def command_names() -> list[str]:
    return sorted(COMMANDS)


def _parser(args: list[str], names: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tollhouse",
        description="A multi-tenant LLM inference gateway and billing platform.",
        epilog="Settings are TOLLHOUSE_* environment variables; docs/settings.md lists them.",
    )
    version = f"%(prog)s {release.version()}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="command", required=True)
    # Import only the subcommand that runs; `--help` and an unknown name need all of them.
    selected = args[:1] if args and args[0] in names else names
    for name in selected:
        module = command_module(name)
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        if hasattr(module, "configure"):
            module.configure(subparser)
    return parser


def command_module(name: str) -> ModuleType:
    """Imports the module of a subcommand."""
    with collector.paused():
        return importlib.import_module(COMMANDS[name])


if __name__ == "__main__":
    sys.exit(main())
