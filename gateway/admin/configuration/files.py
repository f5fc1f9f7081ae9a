"""Reads configuration files: YAML or JSON, one file or a directory of them.

- `include:` lists further files or directories, relative to the file; their lists are joined.
- `${NAME}` in a text is an environment variable, `${NAME:-text}` has a default, `${file:PATH}` is what a
  file holds, without the line break at its end; `$$` is a dollar sign.
- Decimals stay texts, dates stay texts, and a name that is stated twice is an error.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from core.errors import BadRequest
from gateway.admin.configuration.document import Configuration, Number

_SUFFIXES = (".yaml", ".yml", ".json")
_REFERENCE = re.compile(r"\$(?:\$|\{(file:)?([^}:]+)(?::-([^}]*))?\})")
_MOST_BYTES = 16 << 20
_DEEPEST = 16


class _Loader(yaml.SafeLoader):
    """Safe, with decimals and dates as texts, without anchors that expand to more than they say."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not read", None)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names: set[object] = set()
        for name, _ in node.value:
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str) or key in names:
                problem = f"{key!r} is stated twice" if key in names else f"{key!r} is not a name"
                raise yaml.constructor.ConstructorError(None, None, problem, name.start_mark)
            names.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:float", lambda _, node: Number(node.value))
_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))


def read(path: Path) -> Configuration:
    """BadRequest names the file, the place and what is wrong there."""
    joined: dict[str, list[object]] = {}
    for source, document in _documents(path, ()):
        for name, value in document.items():
            if not isinstance(value, list):
                raise BadRequest(
                    f"{source}: {name} is not a list.", next_step="See `tollhouse apply --schema`."
                )
            joined.setdefault(name, []).extend(value)
    try:
        return Configuration.model_validate(joined)
    except ValidationError as error:
        first = error.errors()[0]
        place = _place(joined, first["loc"])
        raise BadRequest(
            f"{path}: {place}: {first['msg']}.", next_step="See `tollhouse apply --schema`."
        ) from None


def _documents(path: Path, within: tuple[Path, ...]) -> Iterator[tuple[Path, Mapping[str, object]]]:
    """The file, or those of the directory by name, and what they include; each before the next."""
    if len(within) > _DEEPEST or path.resolve() in within:
        raise BadRequest(f"{path} includes itself.", next_step="Remove the include.")
    if path.is_dir():
        for each in sorted(path.iterdir()):
            if each.suffix in _SUFFIXES and not each.name.startswith("."):
                yield from _documents(each, within)
        return
    document = _parsed(path)
    includes = document.pop("include", [])
    if not isinstance(includes, list) or not all(isinstance(each, str) for each in includes):
        raise BadRequest(f"{path}: include is not a list of paths.", next_step="Write `[a.yaml]`.")
    yield path, document
    for each in includes:
        yield from _documents(path.parent / str(each), (*within, path.resolve()))


def _parsed(path: Path) -> dict[str, object]:
    try:
        if not path.is_file():
            raise BadRequest(f"{path} is not a file.", next_step="Name a YAML or JSON file.")
        if path.stat().st_size > _MOST_BYTES:
            raise BadRequest(f"{path} is larger than {_MOST_BYTES >> 20} MiB.")
        document = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise BadRequest(f"{path} is not YAML: {reason}.", next_step="Correct the line.") from None
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise BadRequest(f"{path} is not a mapping.", next_step="See `tollhouse apply --schema`.")
    return {name: _resolved(value, path, name) for name, value in document.items()}


def _resolved(value: object, path: Path, place: str) -> object:
    if isinstance(value, str) and not isinstance(value, Number):
        return _REFERENCE.sub(lambda found: _reference(found, path, place), value)
    if isinstance(value, list):
        return [_resolved(each, path, f"{place}[{at}]") for at, each in enumerate(value)]
    if isinstance(value, dict):
        return {name: _resolved(each, path, f"{place}.{name}") for name, each in value.items()}
    return value


def _reference(found: re.Match[str], path: Path, place: str) -> str:
    is_file, name, default = found.groups()
    if name is None:
        return "$"
    if is_file:
        try:
            return (path.parent / name).read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError):
            raise BadRequest(
                f"{path}: {place} names the file {name}, which cannot be read."
            ) from None
    value = os.environ.get(name, default)
    if value is None:
        raise BadRequest(
            f"{path}: {place} names the variable {name}, which is not set.",
            next_step=f"Set {name}, or write ${{{name}:-default}}.",
        )
    return value


def _place(document: object, location: tuple[int | str, ...]) -> str:
    """`tenants.acme.keys.ci.role`: entries of lists by their names, where they have one."""
    shown: list[str] = []
    for step in location:
        document = _step(document, step)
        named = document if isinstance(document, dict) else {}
        shown.append(str(named.get("name", step)) if isinstance(step, int) else step)
    return ".".join(shown)


def _step(document: object, step: int | str) -> object:
    if isinstance(document, dict):
        return document.get(step)
    if isinstance(document, list) and isinstance(step, int) and step < len(document):
        return document[step]
    return None
