"""`tollhouse model`: the models served, their prices, and draining of engines."""

import argparse
from pathlib import Path

from core.data_dir import make_data_dir, private_files
from core.errors import SettingError
from core.extras import imports_of
from core.settings import load_settings
from engine.errors import EngineError
from gateway.admin.output import add_json, show
from gateway.catalog.known_models import KNOWN, WheelModel
from gateway.catalog.model_source import locate, short_name

HELP = "show and fetch models; drain and resume engines"


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="verb", required=True)
    listing = verbs.add_parser("list", help="list models, their engines and prices")
    add_json(listing)
    listing.set_defaults(run=_list)
    fetch = verbs.add_parser("fetch", help="download a model, check it and print its path")
    fetch.add_argument("model", help=f"a hub id (owner/name), or one of: {', '.join(KNOWN)}")
    add_json(fetch)
    fetch.set_defaults(run=_fetch)
    quantize = verbs.add_parser(
        "quantize",
        help="write a model with its weights rounded to 8 or 4 bits (compressed-tensors)",
    )
    quantize.add_argument("model", help="a directory in Hugging Face layout, or a hub id")
    quantize.add_argument("--to", required=True, choices=("int8", "int4", "fp8"))
    quantize.add_argument(
        "--calibrate",
        type=Path,
        metavar="TEXT",
        help="for int4: a file of what the model reads, by which rounding errors are weighed",
    )
    quantize.add_argument("--output", type=Path, help="default: the model's name and the format")
    add_json(quantize)
    quantize.set_defaults(run=_quantize)
    known = verbs.add_parser("known", help="models with a short name: source, licence and size")
    add_json(known)
    known.set_defaults(run=_known)
    engines = verbs.add_parser("engines", help="list engines and whether they are drained")
    add_json(engines)
    engines.set_defaults(run=_engines)
    reload_verb = verbs.add_parser(
        "reload", help="have a running gateway read the file of TOLLHOUSE_UPSTREAMS again"
    )
    reload_verb.add_argument("--dry-run", action="store_true", help="check it and show the changes")
    reload_verb.add_argument("--url", default="", help="default: the gateway of the data directory")
    add_json(reload_verb)
    reload_verb.set_defaults(run=_reload)
    trial = verbs.add_parser(
        "route", help="show where recorded requests would go by a virtual model, and at what cost"
    )
    trial.add_argument(
        "--pools", required=True, metavar="FILE", help="as TOLLHOUSE_VIRTUAL_MODELS has them"
    )
    trial.add_argument("--virtual", default="", metavar="NAME", help="where the file has several")
    trial.add_argument("--model", required=True, help="whose recorded requests are tried")
    trial.add_argument("--from", dest="start", metavar="DATE", help="default: 7 days before")
    trial.add_argument("--to", dest="end", metavar="DATE", help="default: now")
    add_json(trial)
    trial.set_defaults(run=_route)
    for verb, run, help_text in (
        ("drain", _drain, "send no new requests to an engine, for example to replace it"),
        ("resume", _resume, "send requests to a drained engine again"),
    ):
        drain_verb = verbs.add_parser(verb, help=help_text)
        drain_verb.add_argument("engine", help="the engine's name, as listed by `model engines`")
        drain_verb.set_defaults(run=run)


# `model fetch` needs no database: what does is imported when it runs.


def _list(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.served import list_models

    return list_models(arguments)


def _engines(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.served import list_engines

    return list_engines(arguments)


def _drain(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.served import drain

    return drain(arguments)


def _resume(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.served import resume

    return resume(arguments)


def _reload(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.command import reload

    return reload(arguments)


def _route(arguments: argparse.Namespace) -> int:
    from gateway.admin.engines.route_trial import route

    return route(arguments)


def _fetch(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    with private_files():
        make_data_dir(settings.data_dir)
        path = locate(arguments.model, settings.data_dir, refresh=True)
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    shown = {
        "model": arguments.model,
        "path": str(path),
        "bytes": sum(each.stat().st_size for each in files),
    }
    show(shown, as_json=arguments.json, title="model")
    return 0


def _quantize(arguments: argparse.Namespace) -> int:
    source = locate(arguments.model, load_settings().data_dir)
    target = arguments.output or Path(f"{short_name(str(source))}-{arguments.to}")
    with imports_of("engine", "tollhouse model quantize"):
        from engine.models.quantise_files import write_quantized
    try:
        written = write_quantized(source, target, arguments.to, arguments.calibrate)
    except EngineError as error:
        raise SettingError(
            error.message, next_step="Correct the option or the file that the message names."
        ) from None
    shown = {"model": arguments.model, "path": str(target), "bytes": written}
    show(shown, as_json=arguments.json, title="model")
    return 0


def _known(arguments: argparse.Namespace) -> int:
    rows = [
        {
            "name": each.name,
            "source": each.source,
            "licence": each.licence,
            "bytes": each.bytes,
            "sha256": each.sha256 if isinstance(each, WheelModel) else None,
        }
        for each in KNOWN.values()
    ]
    show(rows, as_json=arguments.json, title="models")
    return 0
