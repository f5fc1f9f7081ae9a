"""The data directory: it can be written, and nobody else reads it."""

import os
import stat
from pathlib import Path

import pytest

from core.data_dir import make_data_dir


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_the_data_directory_is_for_its_user_alone(
    tmp_path: Path, umask: int, *, exists: bool
) -> None:
    place, outside = tmp_path / "data", tmp_path / "outside"
    outside.write_text("another's")
    outside.chmod(0o644)
    before = os.umask(umask)
    try:
        if exists:
            place.mkdir(mode=0o755)
            (place / "tollhouse.db").write_text("rows")
            (place / "link").symlink_to(outside)
        make_data_dir(place)
    finally:
        os.umask(before)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    files = [each for each in place.iterdir() if not each.is_symlink()]
    assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600] * exists
    assert stat.S_IMODE(outside.stat().st_mode) == 0o644
