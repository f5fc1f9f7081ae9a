"""`tollhouse engine`: runs an engine worker. The options are those of `engine.worker.server`.

Only `--model` and `--draft-model` are read here: a hub id or short name is resolved to a path, and
fetched, before the engine starts. Without them, TOLLHOUSE_MODEL and TOLLHOUSE_DRAFT_MODEL say which
models they are, and TOLLHOUSE_DRAFT_HEADS which heads guess.
"""

from core.data_dir import private_files
from core.settings import load_settings
from gateway.catalog.model_files import DEMO_NAME

HELP = "run an engine worker; `tollhouse engine --help` shows its options"

_NAMED = ("--model", "--draft-model")


def main(options: list[str]) -> int:
    from engine.worker.server import main as serve

    with private_files():  # of receipts and of cached prompts
        return serve(with_model_path(options))


def with_model_path(options: list[str]) -> list[str]:
    """The same options with the paths of the models' files."""
    from gateway.catalog.checkpoint import check_servable
    from gateway.catalog.model_source import locate, locate_draft

    if {"--help", "-h", "--fake"} & set(options):
        return options
    settings = load_settings()
    taken = _taken(options)
    if taken is None:  # argparse says what is wrong
        return options
    rest, values = taken
    named = values.get("--model")
    model = settings.model if named is None else named
    path = locate("" if model == DEMO_NAME else model, settings.data_dir)
    check_servable(path)
    draft = locate_draft(
        settings.model_copy(
            update={"draft_model": values.get("--draft-model", settings.draft_model)}
        )
    )
    drafting = [] if draft is None else ["--draft-model", str(draft)]
    if settings.draft_heads != "auto" and not any(_is_heads(each) for each in rest):
        drafting += ["--draft-heads", settings.draft_heads]
    return ["--model", str(path), *drafting, *rest]


def _is_heads(option: str) -> bool:
    return option.partition("=")[0] == "--draft-heads"


def _taken(options: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """The options without those that name models, and these; None where a value is missing."""
    rest: list[str] = []
    named: dict[str, str] = {}
    left = iter(options)
    for each in left:
        name, equals, value = each.partition("=")
        if name not in _NAMED:
            rest.append(each)
        elif equals:
            named[name] = value
        else:
            given = next(left, None)
            if given is None:
                return None
            named[name] = given
    return rest, named
