"""The data directory: `TOLLHOUSE_DATA_DIR`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from core.errors import SettingError

_OWN_DIR, _OWN_FILE = 0o700, 0o600
_OTHERS = 0o077


@contextmanager
def private_files() -> Iterator[None]:
    """Within, whatever this process and its children create is for this user alone: mode 0700 of
    directories, at most 0600 of files. For entry points, since the umask is the whole process's."""
    before = os.umask(_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def make_data_dir(path: Path) -> None:
    """Create it where it is missing, for this user alone whatever the umask. SettingError if this user
    may not write there."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=_OWN_DIR)
        _make_private(path)
        probe = path / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise SettingError(
            f"TOLLHOUSE_DATA_DIR {path} cannot be written: {error.strerror}.",
            next_step="Set it to a directory that this user may write.",
        ) from None


def _make_private(path: Path) -> None:
    """Another user's directory is left as it is: this process may not change it."""
    if path.stat().st_uid != os.geteuid():
        return
    path.chmod(_OWN_DIR)
    for each in path.iterdir():
        if each.is_file() and not each.is_symlink() and each.stat().st_uid == os.geteuid():
            each.chmod(_OWN_FILE)
