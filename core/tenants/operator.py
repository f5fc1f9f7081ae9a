"""The operator's token: TOLLHOUSE_ADMIN_TOKEN, or generated once into the data directory."""

import os
import secrets
from pathlib import Path

from core.errors import SettingError
from core.settings import Settings

_LEAST = 16
FILE = "admin-token"


def operator_token(settings: Settings) -> str:
    """The token of this deployment. A generated file is readable by its owner only (mode 0600)."""
    if settings.admin_token:
        if len(settings.admin_token) < _LEAST:
            raise SettingError(
                f"TOLLHOUSE_ADMIN_TOKEN has fewer than {_LEAST} characters.",
                next_step="Set a longer token, or unset it to have one generated.",
            )
        return settings.admin_token
    path = settings.data_dir / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    return _read(path) or _mint(path)


def is_operator_token(token: str, given: str) -> bool:
    return secrets.compare_digest(token.encode(), given.encode("utf-8", "replace"))


def _mint(path: Path) -> str:
    """Written to a temporary file, then linked, so that no process reads a partial token."""
    fresh = path.with_name(f"{FILE}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_urlsafe(32))
    try:
        os.link(fresh, path)
    except FileExistsError:
        pass
    finally:
        fresh.unlink()
    return _read(path)


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""
