"""`tollhouse import`: the models, aliases, fallbacks and budgets of another gateway's configuration."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import yaml

from core.errors import BadRequest
from gateway.admin.imports import litellm, portkey
from gateway.admin.imports.imported import Imported
from gateway.admin.output import add_json, say, show

HELP = "make our configuration of LiteLLM's or Portkey's; what has no counterpart is listed"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="from", required=True)
    lite = verbs.add_parser("litellm", help="a config.yaml of LiteLLM's proxy")
    key = verbs.add_parser("portkey", help="a configuration of Portkey's gateway, as JSON")
    key.add_argument("--name", default="portkey", help="of the virtual model that it becomes")
    for each, run in ((lite, _litellm), (key, _portkey)):
        each.add_argument("file", type=Path)
        each.add_argument("--output", type=Path, metavar="DIR", help="write the files there")
        each.add_argument("--tenant", default="demo", help="whose budgets those of the file become")
        add_json(each)
        each.set_defaults(run=run)


def _litellm(arguments: argparse.Namespace) -> int:
    return _finish(litellm.read(arguments.file), arguments)


def _portkey(arguments: argparse.Namespace) -> int:
    return _finish(portkey.read(arguments.file, arguments.name), arguments)


def _finish(made: Imported, arguments: argparse.Namespace) -> int:
    lines = _write(made, arguments) if arguments.output is not None else []
    shown = made.shown()
    if arguments.json:
        show(shown | {"settings": lines}, as_json=True)
        return 0
    rows = [
        {
            "model": each["model"],
            "provider": each.get("provider", each.get("engine", "server")),
            "upstream model": each["upstream_model"],
            "key": "yes" if each.get("api_key") else "no",
        }
        for each in shown["upstreams"]
    ]
    show(rows, as_json=False, title="models")
    for name, pool in made.virtual_models.items():
        say(f"virtual model {name}: {json.dumps(pool)}")
    for model, after in made.fallbacks.items():
        say(f"fallback: {model} -> {', '.join(after)}")
    for each in made.left_out:
        say(f"left out: {each}")
    for line in lines:
        say(line)
    if not lines:
        say("Nothing was written; give --output DIR.")
    return 0


def _write(made: Imported, arguments: argparse.Namespace) -> list[str]:
    """The files, none of which may be there, and the settings that name them."""
    folder: Path = arguments.output.resolve()
    files: dict[str, str] = {"upstreams.json": json.dumps(made.upstreams, indent=2)}
    lines = [f"TOLLHOUSE_UPSTREAMS={folder / 'upstreams.json'}"]
    if made.virtual_models:
        files["virtual-models.json"] = json.dumps(made.virtual_models, indent=2)
        lines.append(f"TOLLHOUSE_VIRTUAL_MODELS={folder / 'virtual-models.json'}")
    if made.fallbacks:
        lines.append(f"TOLLHOUSE_FALLBACKS={json.dumps(made.fallbacks)}")
    if made.budgets:
        tenants: dict[str, Any] = {"tenants": [{"name": arguments.tenant, "budgets": made.budgets}]}
        files["tollhouse.yaml"] = yaml.safe_dump(tenants, sort_keys=False)
        lines.append(f"tollhouse apply -f {folder / 'tollhouse.yaml'}")
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise BadRequest(
            f"{folder / there[0]} exists already.",
            next_step="Name another directory, or remove it.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            with os.fdopen(os.open(folder / name, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(f"{text.rstrip()}\n")
    except OSError as error:
        raise BadRequest(f"{folder} cannot be written: {error.strerror}.") from None
    return lines
