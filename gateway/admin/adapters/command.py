"""`tollhouse adapter`: the LoRA adapters of a tenant."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import BadRequest, SettingError
from core.extras import imports_of
from core.settings import load_settings
from core.tenants import adapters
from core.tenants.scope import TenantScope
from engine.errors import EngineError
from engine.model_spec import ModelSpec
from gateway.admin.console import CommandContext, add_tenant, command_context, scope_named
from gateway.admin.output import add_json, show
from gateway.catalog.adapter_archive import AdapterFiles
from gateway.catalog.adapter_store import AdapterStore
from gateway.catalog.checkpoint import read_config, spec_of
from gateway.catalog.model_files import model_name
from gateway.catalog.model_source import locate, locate_configured, short_name
from gateway.serving.record import names_here

HELP = "add, list, remove and merge LoRA adapters"


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
    merge = verbs.add_parser(
        "merge", help="write a model with an adapter in its weights (Hugging Face layout)"
    )
    merge.add_argument("model", help="a directory in Hugging Face layout, or a hub id")
    merge.add_argument("adapter", type=Path, help="a PEFT directory")
    merge.add_argument("--output", type=Path, help="default: the names of model and adapter")
    add_json(merge)
    merge.set_defaults(run=_merge)
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
    adapters.check_name(arguments.name)
    with command_context() as tools:
        store = AdapterStore(tools.settings.data_dir / "adapters", ())
        base_model = _base_model(tools, arguments.base_model)
        with tools.database.read() as session:
            scope = scope_named(session, arguments.tenant)
        with _files(store, arguments.path) as files:
            if not tools.settings.upstreams:
                files.check_served(_spec(tools, base_model))
            with store.locked(scope.tenant_id):
                shown = _register(tools, scope, arguments.name, base_model, store, files)
    show(shown, as_json=arguments.json, title="adapter")
    return 0


def _register(
    tools: CommandContext,
    scope: TenantScope,
    name: str,
    base_model: str,
    store: AdapterStore,
    files: AdapterFiles,
) -> dict[str, Any]:
    files = store.keep(scope.tenant_id, files)
    with tools.database.transaction() as session:
        adapter = adapters.register(
            session,
            scope,
            tools.clock,
            name=name,
            base_model=base_model,
            digest=files.digest,
            path=store.stored_path(files),
            rank=files.rank,
            bytes=files.bytes,
        )
        return adapters.describe(adapter)


def _spec(tools: CommandContext, base_model: str) -> ModelSpec | None:
    """Of a base model that the settings name; a running server may serve another one."""
    if base_model != model_name(tools.settings):
        return None
    path = locate_configured(tools.settings, weights=False)
    return spec_of(read_config(path))


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


def _merge(arguments: argparse.Namespace) -> int:
    source = locate(arguments.model, load_settings().data_dir)
    name = f"{short_name(str(source))}-{arguments.adapter.resolve().name}"
    target = arguments.output or Path(name)
    with imports_of("engine", "tollhouse adapter merge"):
        from engine.adapters.merge import write_merged
    try:
        written = write_merged(source, arguments.adapter, target)
    except EngineError as error:
        raise SettingError(
            error.message, next_step="Correct the option or the file that the message names."
        ) from None
    shown = {"adapter": str(arguments.adapter), "path": str(target), "bytes": written}
    show(shown, as_json=arguments.json, title="model")
    return 0


@contextmanager
def _files(store: AdapterStore, path: Path) -> Iterator[AdapterFiles]:
    if path.is_dir():
        config, weights = path / "adapter_config.json", path / "adapter_model.safetensors"
        if not (config.is_file() and weights.is_file()):
            raise BadRequest(
                f"{path} is not a PEFT adapter: it lacks {config.name} or {weights.name}.",
                next_step="Name a directory with both files.",
            )
        with (
            config.open("rb") as first,
            weights.open("rb") as second,
            store.from_files(first, second) as files,
        ):
            yield files
        return
    if not path.is_file():
        raise BadRequest(f"{path} does not exist.", next_step="Name a directory or an archive.")
    with path.open("rb") as archive, store.from_archive(archive) as files:
        yield files
