"""`tollhouse adapter`: the LoRA adapters of a tenant."""

import argparse
from pathlib import Path

from core.errors import BadRequest
from core.tenants import adapters
from gateway.catalog.adapter_files import AdapterFiles
from gateway.catalog.adapter_store import AdapterStore
from gateway.cli.commands._tenant_options import add_tenant, scope_named
from gateway.cli.context import CommandContext, command_context
from gateway.cli.output import add_json, show
from gateway.http.serving_record import names_here

HELP = "add, list and remove a tenant's LoRA adapters"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    listed = verbs.add_parser("list", help="list the adapters of a tenant")
    listed.set_defaults(run=_list)
    add = verbs.add_parser("add", help="copy an adapter to the data directory and register it")
    add.add_argument("name")
    add.add_argument("path", type=Path, help="a PEFT directory, or a tar or zip of one")
    add.add_argument("--base-model", default="", help="default: the served model")
    add.set_defaults(run=_add)
    remove = verbs.add_parser("remove", help="remove an adapter")
    remove.add_argument("name")
    remove.set_defaults(run=_remove)
    for each in (listed, add, remove):
        add_tenant(each)
        add_json(each)


def _list(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.read() as session:
        results = adapters.all_of(session, scope_named(session, arguments.tenant))
        rows = [adapters.describe(each) for each in results]
    if not arguments.json:
        names = ("name", "base_model", "rank", "bytes", "digest", "created_at")
        rows = [{name: row[name] for name in names} for row in rows]
    show(rows, as_json=arguments.json, title="adapters")
    return 0


def _add(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        adapters.check_name(arguments.name)
        files = _files(tools, scope.tenant_id, arguments.path)
        adapter = adapters.register(
            session,
            scope,
            tools.clock,
            name=arguments.name,
            base_model=_base_model(tools, arguments.base_model),
            digest=files.digest,
            path=str(files.path.resolve()),
            rank=files.rank,
            bytes=files.bytes,
        )
        shown = adapters.describe(adapter)
    show(shown, as_json=arguments.json, title="adapter")
    return 0


def _base_model(tools: CommandContext, name: str) -> str:
    """The one that is named, or the only one that is served."""
    known = names_here(tools.settings)
    if not name and len(known) == 1:
        return known[0]
    if name not in known:
        raise BadRequest(
            f"There is no base model {name[:120]!r}; known: {', '.join(known)}."
            if name
            else f"Several models are served: {', '.join(known)}.",
            next_step="Name one of them with --base-model.",
        )
    return name


def _remove(arguments: argparse.Namespace) -> int:
    with command_context() as tools, tools.database.transaction() as session:
        scope = scope_named(session, arguments.tenant)
        shown = adapters.describe(adapters.remove(session, scope, tools.clock, arguments.name))
    show(shown, as_json=arguments.json, title="adapter")
    return 0


def _files(tools: CommandContext, tenant_id: str, path: Path) -> AdapterFiles:
    store = AdapterStore(tools.settings.data_dir / "adapters", ())
    if path.is_dir():
        config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
        if not (config.is_file() and weights.is_file()):
            raise BadRequest(
                f"{path} is not a PEFT adapter: it lacks {config.name} or {weights.name}.",
                next_step="Name a directory with both files.",
            )
        with config.open("rb") as first, weights.open("rb") as second:
            return store.from_files(tenant_id, first, second)
    if not path.is_file():
        raise BadRequest(f"{path} does not exist.", next_step="Name a directory or an archive.")
    with path.open("rb") as archive:
        return store.from_archive(tenant_id, archive)
