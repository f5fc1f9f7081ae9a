"""The data directory: `TOLLHOUSE_DATA_DIR`."""

import os
from pathlib import Path

from core.errors import SettingError


def make_data_dir(path: Path) -> None:
    """Create it where it is missing. SettingError if this user may not write there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingError(
            f"TOLLHOUSE_DATA_DIR {path} cannot be written: {error.strerror}.",
            next_step="Set it to a directory that this user may write.",
        ) from None
