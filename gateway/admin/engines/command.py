"""`tollhouse engine`: runs an engine worker. The options are those of `engine.worker.server`.

Only `--model` and `--draft-model` are read here: a hub id or short name is resolved to a path, and
fetched, before the engine starts. Without them, TOLLHOUSE_MODEL and TOLLHOUSE_DRAFT_MODEL say which
models they are, and TOLLHOUSE_DRAFT_HEADS which heads guess; TOLLHOUSE_TP says how many ranks it has.
"""

import argparse
import json
import urllib.request
from typing import Any
from urllib.error import HTTPError, URLError

from core.data_dir import private_files
from core.errors import Conflict, Unavailable
from core.settings import load_settings
from core.tenants.operator import operator_token
from gateway.admin.output import show
from gateway.catalog.model_files import DEMO_NAME
from gateway.catalog.model_source import locate
from gateway.serving.record import url_here

_PATH = "/admin/v1/engines/upstreams"
_TIMEOUT_S = 60.0


def reload(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    url, token = arguments.url or url_here(settings), operator_token(settings)
    found = _ask(url, token, _PATH)
    if found["changes"] and not arguments.dry_run:
        found = _ask(url, token, f"{_PATH}/reload", {"digest": found["digest"]})
    if arguments.json:
        show(found, as_json=True, title="upstreams")
        return 0
    rows = [{**each, "fields": ", ".join(each["fields"])} for each in found["changes"]]
    title = "would change" if arguments.dry_run else "changed"
    show(rows, as_json=False, title=title if rows else f"{found['file']}: nothing to change")
    return 0


def _ask(url: str, token: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body is not None else None
    headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except HTTPError as error:
        raise Conflict(_message(error.read())) from None
    except (URLError, OSError) as error:
        raise Unavailable(
            f"No gateway answers at {url}: {error}.",
            next_step="Start one with `tollhouse serve`, or give its address with --url.",
        ) from None


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


HELP = "run an engine worker; `tollhouse engine --help` shows its options"

_NAMED = ("--model", "--draft-model")


def main(options: list[str]) -> int:
    from engine.worker.server import main as serve

    with private_files():  # of receipts and of cached prompts
        return serve(with_model_path(options))


def with_model_path(options: list[str]) -> list[str]:
    """The same options with the paths of the models' files."""
    from gateway.catalog.checkpoint import check_servable
    from gateway.catalog.model_source import locate_draft

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
    if settings.draft_heads != "auto" and not any(_is(each, "--draft-heads") for each in rest):
        drafting += ["--draft-heads", settings.draft_heads]
    if settings.tp > 1 and not any(_is(each, "--tp") for each in rest):
        rest = ["--tp", str(settings.tp), *rest]
    return ["--model", str(path), *drafting, *rest]


def _is(option: str, name: str) -> bool:
    return option.partition("=")[0] == name


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
