"""Weights of the hub, downloaded so that the next try continues where the last one ended.

huggingface_hub restarts every file. Here each file is written to `<ETag>.part` among the blobs of its
cache, with HTTP ranges. A complete file with the right checksum gets the name that huggingface_hub looks
for. A file that changed on the hub has another ETag, and so starts from the beginning.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

# SHA-256 for large files, git's object id for small ones.
_SHA256, _GIT_ID = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_CHUNK = 2**20


def checksum(file: Path, announced: str) -> str:
    """Of the kind that was announced; empty where that is no checksum."""
    if _SHA256.fullmatch(announced):
        digest = hashlib.sha256()
    elif _GIT_ID.fullmatch(announced):
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    else:
        return ""
    with file.open("rb") as content:
        while chunk := content.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


_TRIES = 4  # in a row without a new byte
_PAUSE_S = 1.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_RANGE = re.compile(r"bytes (\d+)-\d+/(?:\d+|\*)")
_ETAG = re.compile(r"[0-9A-Za-z_-]{8,128}")  # it becomes the name of a file


class Mismatch(Exception):
    """The named file is not what the hub announced."""


@dataclass(frozen=True)
class _File:
    name: str
    url: str
    etag: str
    size: int


def prefetch(repository: str, allow: list[str], ignore: list[str]) -> None:
    """Puts the files that match into the hub's cache. Errors are huggingface_hub's own, or OSError."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    info = HfApi().model_info(repository, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    names = [each.rfilename for each in info.siblings or []]
    wanted = _utils().filter_repo_objects(names, allow_patterns=allow, ignore_patterns=ignore)
    folder = repo_folder_name(repo_id=repository, repo_type="model")
    blobs = Path(constants.HF_HUB_CACHE) / folder / "blobs"
    described = [_describe(repository, info.sha, name) for name in wanted]
    files = [file for file in described if file is not None]
    blobs.mkdir(parents=True, exist_ok=True)
    _discard_stale(blobs, {file.etag for file in files})
    for file in files:
        _download(file, blobs)


def _describe(repository: str, revision: str | None, name: str) -> _File | None:
    """None where the hub does not say enough: huggingface_hub then downloads the file in its own way."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, name, revision=revision)
    found = get_hf_file_metadata(url)
    if not found.size or not found.etag or not _ETAG.fullmatch(found.etag):
        return None
    return _File(name, url, found.etag, found.size)


def _discard_stale(blobs: Path, etags: Iterable[str]) -> None:
    """Parts of files that are not the repository's any more."""
    current = {f"{etag}.part" for etag in etags}
    for part in blobs.glob("*.part"):
        if part.name not in current:
            part.unlink(missing_ok=True)


def _download(file: _File, blobs: Path) -> None:
    target, part = blobs / file.etag, blobs / f"{file.etag}.part"
    if target.exists():
        return
    with part.open("ab") as out:
        fcntl.flock(out, fcntl.LOCK_EX)  # a second process waits, and then finds the file
        if target.exists():
            part.unlink(missing_ok=True)
            return
        try:
            _need_space(file, out)
            _fill(file, out)
            out.flush()
            os.fsync(out.fileno())
            if checksum(part, file.etag) not in (file.etag, ""):
                part.unlink()
                raise Mismatch(file.name)
        except OSError as error:
            if error.errno in _NO_ROOM:
                part.unlink(missing_ok=True)
            raise
        part.replace(target)


def _need_space(file: _File, out: IO[bytes]) -> None:
    """Before the first byte, so that a disk is not filled in vain."""
    if shutil.disk_usage(Path(out.name).parent).free < file.size - out.tell():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _fill(file: _File, out: IO[bytes]) -> None:
    """Appends until the file is whole; gives up after some tries that bring no new byte."""
    furthest, failures = out.tell(), 0
    with _progress(file, out.tell()) as bar:
        while out.tell() != file.size:
            try:
                _append(file, out, bar)
                broken = None
            except Exception as error:
                if not _is_transient(error):
                    raise
                broken = error
            failures = 0 if out.tell() > furthest else failures + 1
            furthest = max(furthest, out.tell())
            if failures == _TRIES:
                raise broken or Mismatch(file.name)
            if out.tell() != file.size:
                time.sleep(_PAUSE_S)


def _append(file: _File, out: IO[bytes], bar: Any) -> None:
    from huggingface_hub import constants, get_session

    if out.tell() > file.size:
        _begin_anew(out, bar)
    headers: dict[str, str] = _utils().build_hf_headers() | {"Accept-Encoding": "identity"}
    if out.tell():
        headers["Range"] = f"bytes={out.tell()}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    session = get_session()
    with session.stream("GET", file.url, headers=headers, timeout=timeout) as answer:
        if answer.status_code == 416:
            _begin_anew(out, bar)
            return
        _utils().hf_raise_for_status(answer)
        if out.tell() and not _continues(answer, out.tell()):
            _begin_anew(out, bar)
            if answer.status_code == 206:
                return
        for chunk in answer.iter_bytes():
            out.write(chunk)
            bar.update(len(chunk))
    out.flush()


def _continues(answer: Any, begin: int) -> bool:
    """Whether the server honours the range; 200 is the whole file once more."""
    found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    return answer.status_code == 206 and found is not None and int(found[1]) == begin


def _begin_anew(out: IO[bytes], bar: Any) -> None:
    bar.update(-out.tell())
    out.truncate(0)
    out.seek(0)


def _is_transient(error: Exception) -> bool:
    """A connection that broke or timed out, by the names that httpx gives its errors."""
    return any(each.__name__ == "TransportError" for each in type(error).__mro__)


def _progress(file: _File, begin: int) -> Any:
    return _utils().tqdm(total=file.size, initial=begin, unit="B", unit_scale=True, desc=file.name)


def _utils() -> Any:
    """Documented functions of a package whose types do not say that it exports them."""
    from huggingface_hub import utils

    return utils
