"""A small file system in memory, which a test or a chaos round really fills, to the last byte."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_BALLAST = "ballast"


@contextlib.contextmanager
def mounted(folder: Path, mebibytes: int) -> Iterator[bool]:
    """The folder is a file system of this size. False, and a plain folder, where this user may not
    mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "small-disk", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, mebibytes: int) -> Iterator[Path]:
    """As `mounted`, for a test, which is skipped where it may not mount."""
    with mounted(folder, mebibytes) as is_small:
        if not is_small:
            pytest.skip("this user may not mount a file system: run as root")
        yield folder


def fill(folder: Path) -> None:
    """Until not one more byte fits."""
    with (folder / _BALLAST).open("ab", buffering=0) as file:
        for size in (2**20, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def free(folder: Path) -> None:
    (folder / _BALLAST).unlink(missing_ok=True)
