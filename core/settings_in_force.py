"""The settings that a process runs with, where each comes from, and its value without secrets."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.settings import PREFIX, Settings

_SECRET = re.compile(r"(api_key|token|secret|password)$")
# User and password of a URL, and passwords and keys among its parameters.
_USER = re.compile(r"(?<=://)[^/@\s]+@")
_PARAMETER = re.compile(r"(?i)((?:password|secret|token|api_?key)=)[^&\s]+")
_HIDDEN = "***"


@dataclass(frozen=True, slots=True)
class SettingInForce:
    name: str  # TOLLHOUSE_…
    value: str  # secrets are hidden
    source: str  # default | environment | file | command
    about: str


def settings_in_force(settings: Settings) -> Sequence[SettingInForce]:
    """In the order of docs/settings.md. What neither the environment nor the settings file says, and
    differs from its default, was given by the command that started the process."""
    path = os.environ.get(f"{PREFIX}ENV_FILE", "") or "tollhouse.env"
    in_file = _names_in(Path(path))
    found = []
    for field, described in Settings.model_fields.items():
        name, value = PREFIX + field.upper(), getattr(settings, field)
        if name in os.environ:
            source = "environment"
        elif name in in_file:
            source = "file"
        else:
            source = "default" if value == described.get_default() else "command"
        found.append(
            SettingInForce(name, _shown(field, value), source, described.description or "")
        )
    return found


def _names_in(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    lines = path.read_text(encoding="utf-8").splitlines()
    return {line.partition("=")[0].strip().removeprefix("export ") for line in lines}


def _shown(field: str, value: Any) -> str:
    if value in (None, "", ()):
        return ""
    if _SECRET.search(field):
        return _HIDDEN
    if isinstance(value, (list, tuple)):
        value = ", ".join(str(each) for each in value)
    text = str(value)
    if text.lstrip().startswith(("[", "{")):
        try:
            return json.dumps(_without_secrets(json.loads(text)), ensure_ascii=False)
        except ValueError:
            return _HIDDEN  # it is not what it should be, and may hold a key
    return _PARAMETER.sub(rf"\1{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", text))


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _HIDDEN if _SECRET.search(str(name)) and each else _without_secrets(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(each) for each in value]
    if isinstance(value, str):
        return _PARAMETER.sub(rf"\1{_HIDDEN}", _USER.sub(f"{_HIDDEN}@", value))
    return value
