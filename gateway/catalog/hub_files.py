"""Checkpoints of the Hugging Face hub, through its own client.

The client keeps every file that is complete, shows progress on a terminal, and reads HF_TOKEN, HF_HOME
and HF_HUB_OFFLINE. It compares only sizes, and does not resume: `hub_download` fetches the weights before
it. Here: which files are wanted, their checksums, and a one-line error for each way to fail.
"""

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.errors import SettingError, TollhouseError, Unavailable
from gateway.catalog.hub_download import Mismatch, checksum, prefetch

_DESCRIPTION = ["*.json", "*.jinja", "tokenizer.model"]
_WEIGHTS = ["*.safetensors"]
# Second copies of the weights, and other formats in folders of their own.
_UNWANTED = ["consolidated*", "original/*", "onnx/*", "*/*.json", "*/*.safetensors"]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def description(repository: str, *, refresh: bool = False) -> Path:
    """The directory with the configuration and the tokenizer; weights may be missing."""
    return _snapshot(repository, _DESCRIPTION, refresh)


def checkpoint(repository: str, *, refresh: bool = False) -> Path:
    """The directory with all that serving needs."""
    directory = _snapshot(repository, _DESCRIPTION + _WEIGHTS, refresh)
    if not any(directory.glob("*.safetensors")):
        raise SettingError(
            f"The hub repository {repository} has no safetensors weights.",
            next_step="Choose a repository with *.safetensors files, or give a .gguf file.",
        )
    return directory


def cached(repository: str) -> Path | None:
    """The directory with all that serving needs, where it was fetched before."""
    try:
        from huggingface_hub import snapshot_download

        wanted = _DESCRIPTION + _WEIGHTS
        return Path(
            snapshot_download(
                repository,
                local_files_only=True,
                allow_patterns=wanted,
                ignore_patterns=_UNWANTED,
            )
        )
    except (ImportError, OSError, ValueError):  # not there, or not a hub id
        return None


def _snapshot(repository: str, patterns: list[str], refresh: bool) -> Path:
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        raise SettingError(
            f"{repository} cannot be fetched: huggingface_hub is not installed.",
            next_step="pip install huggingface_hub, or give a directory.",
        ) from None
    wanted: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": _UNWANTED}
    try:
        if not refresh:
            try:
                return Path(snapshot_download(repository, local_files_only=True, **wanted))
            except LocalEntryNotFoundError:
                pass
        if set(_WEIGHTS) <= set(patterns) and not constants.HF_HUB_OFFLINE:
            prefetch(repository, _WEIGHTS, _UNWANTED)
        directory = Path(snapshot_download(repository, **wanted))
    except Exception as error:
        raise _explained(repository, error) from None
    _check_sums(repository, directory)
    return directory


def _check_sums(repository: str, directory: Path) -> None:
    """Discard files whose content is not what the hub announced."""
    for link in sorted(path for path in directory.rglob("*") if path.is_symlink()):
        blob = link.resolve()
        if checksum(blob, blob.name) not in (blob.name, ""):
            link.unlink()
            blob.unlink()
            raise _mismatch(repository, link.name)


def _explained(repository: str, error: Exception) -> TollhouseError:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled

    causes = list(_causes(error))
    for each in causes:
        if isinstance(each, OfflineModeIsEnabled):
            return SettingError(
                f"{repository} is not in the local hub cache, and HF_HUB_OFFLINE forbids fetching it.",
                next_step="Unset HF_HUB_OFFLINE, or give a directory.",
            )
        if isinstance(each, GatedRepoError):
            return _gated(repository)
        if isinstance(each, HfHubHTTPError):
            return _refused(repository, each.response.status_code)
        if isinstance(each, OSError) and each.errno in _NO_ROOM:
            return disk_full(repository, each)
        if isinstance(each, Mismatch):
            return _mismatch(repository, str(each))
        if isinstance(each, OSError) and "Consistency check failed" in str(each):
            return _mismatch(repository, "A file")
        if isinstance(each, ValueError) and type(each).__name__ == "HFValidationError":
            return SettingError(
                f"{repository!r} is not a hub id.", next_step="A hub id has the form owner/name."
            )
    if any(type(each).__module__.startswith(("httpx", "requests", "urllib3")) for each in causes):
        return Unavailable(
            f"{repository} cannot be fetched: the hub does not answer.",
            next_step="Check the network and HTTPS_PROXY, or give a directory or a .gguf file.",
        )
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    return Unavailable(f"{repository} cannot be fetched: {why}", next_step="Give a directory.")


def disk_full(name: str, error: OSError) -> Unavailable:
    return Unavailable(
        f"{name} cannot be fetched: {error.strerror or 'no space left on device'}"
        f"{f' ({error.filename})' if error.filename else ''}.",
        next_step="Free disk space and run the command again.",
    )


def _mismatch(repository: str, file: str) -> Unavailable:
    return Unavailable(
        f"{file} of {repository} does not match its checksum or size and was discarded.",
        next_step="Run the command again: it fetches that file again.",
    )


def _gated(repository: str) -> SettingError:
    return SettingError(
        f"The hub refuses access to {repository}: it is gated or private.",
        next_step="Accept its terms on its page of the hub, and set HF_TOKEN to a token of that account.",
    )


def _refused(repository: str, status: int) -> TollhouseError:
    if status == 404:
        return SettingError(
            f"The hub has no model repository {repository} (404).",
            next_step="Check the spelling; a private repository needs HF_TOKEN.",
        )
    if status == 401:
        return SettingError(
            f"The hub has no model repository {repository}, or it is private or gated (401).",
            next_step="Check the spelling, and set HF_TOKEN to a token that may read it.",
        )
    if status == 403:
        return _gated(repository)
    if status == 429:
        return Unavailable(
            f"The hub limits requests at the moment (429); {repository} was not fetched.",
            next_step="Wait a few minutes, or set HF_TOKEN for a higher limit.",
        )
    return Unavailable(
        f"The hub answers {status}; {repository} was not fetched.", next_step="Try again later."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__
