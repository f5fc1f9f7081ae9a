"""The operator's token: TOLLHOUSE_ADMIN_TOKEN, or generated once into the data directory."""

import os
import secrets
from pathlib import Path

from core.errors import SettingError
from core.settings import Settings

_MIN_LENGTH = 16
FILE_NAME = "admin-token"


def operator_token(settings: Settings) -> str:
    """The token of this deployment. A generated file is readable by its owner only (mode 0600)."""
    if settings.admin_token:
        if len(settings.admin_token) < _MIN_LENGTH:
            raise SettingError(
                f"TOLLHOUSE_ADMIN_TOKEN has fewer than {_MIN_LENGTH} characters.",
                next_step="Set a longer token, or unset it to have one generated.",
            )
        return settings.admin_token
    path = settings.data_dir / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    return _read(path) or _generate(path)


def known_operator_token(settings: Settings) -> str:
    """As `operator_token`, but empty where none was generated yet."""
    return settings.admin_token or _read(settings.data_dir / FILE_NAME)


def is_operator_token(token: str, candidate: str) -> bool:
    return secrets.compare_digest(token.encode(), candidate.encode("utf-8", "replace"))


def _generate(path: Path) -> str:
    """Written to a temporary file, then linked, so that no process reads a partial token."""
    temporary = path.with_name(f"{FILE_NAME}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read(path)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
