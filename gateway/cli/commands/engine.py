"""`tollhouse engine`: runs an engine worker. The options are those of `engine.worker.server`.

Only `--model` is read here: a hub id or short name is resolved to a path, and fetched, before the
engine starts. Without it, TOLLHOUSE_MODEL says which model is served.
"""

from core.settings import load_settings
from gateway.catalog.model_files import DEMO_NAME

HELP = "run an engine worker; `tollhouse engine --help` shows its options"


def main(options: list[str]) -> int:
    from engine.worker.server import main as serve

    return serve(with_model_path(options))


def with_model_path(options: list[str]) -> list[str]:
    """The same options with the path of the model's files."""
    from gateway.catalog.checkpoint import check_servable
    from gateway.catalog.model_source import locate

    if {"--help", "-h", "--fake"} & set(options):
        return options
    settings = load_settings()
    rest, named = _taken(options)
    if rest is None:  # argparse says what is wrong
        return options
    model = settings.model if named is None else named
    path = locate("" if model == DEMO_NAME else model, settings.data_dir)
    check_servable(path)
    return ["--model", str(path), *rest]


def _taken(options: list[str]) -> tuple[list[str] | None, str | None]:
    """The options without `--model`, and its value; no options where the value is missing."""
    rest: list[str] = []
    named: str | None = None
    left = iter(options)
    for each in left:
        if each == "--model":
            named = next(left, None)
            if named is None:
                return None, None
        elif each.startswith("--model="):
            named = each.partition("=")[2]
        else:
            rest.append(each)
    return rest, named
