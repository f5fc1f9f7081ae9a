"""Destinations of scheduled exports: a local directory, or a bucket of an S3-compatible store.

S3 needs boto3 (the extra `tollhouse[s3]`), which finds credentials as usual: AWS_* variables, a
profile, or the machine's role.
"""

import importlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from core.errors import BadRequest
from core.extras import imports_of
from core.settings import Settings
from core.waiting import within

_CONNECT_S, _READ_S, _TRIES = 5, 7, 2  # a store that is silent is found within 15 s
# Those bound each read; a whole exchange has this, and a file a second for so many bytes more.
_SHORT_S, _LEAST_RATE = 30.0, 100_000
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


class Store(Protocol):
    def put(self, name: str, file: Path, media_type: str, sha256: str) -> str:
        """Store the file atomically under the name, replacing an existing one; returns its
        address. Raises the store's own errors.
        """
        ...

    def probe(self) -> None:
        """Raise if the destination is not writable."""
        ...


def open_store(destination: str, settings: Settings) -> Store:
    """`s3://bucket/prefix`, or a directory: absolute, or under TOLLHOUSE_EXPORT_DIR."""
    if destination.startswith("s3://"):
        parts = urlsplit(destination)
        if not parts.netloc:
            raise BadRequest(
                f"{destination!r} names no bucket.",
                next_step="Use the form s3://bucket/prefix.",
                param="destination",
            )
        return S3Store(parts.netloc, parts.path.strip("/"), settings.export_store_url)
    if "://" in destination or not destination.strip():
        raise BadRequest(
            f"{destination!r} is not a destination.",
            next_step="Use a directory, or s3://bucket/prefix.",
            param="destination",
        )
    return DirectoryStore((settings.export_dir or settings.data_dir / "exports") / destination)


def own_folder(tenant_id: str, folder: str) -> str:
    """A destination chosen by a tenant: a folder of its own under TOLLHOUSE_EXPORT_DIR, so that the
    tenant cannot write to other paths.
    """
    parts = folder.split("/")
    if not all(_PLAIN.fullmatch(part) for part in parts) or len(folder) > 200:
        raise BadRequest(
            f"{folder[:80]!r} is not a valid folder name.",
            next_step="Use a name such as finance or finance/daily; the operator can set up a bucket.",
            param="destination",
        )
    return "/".join(("tenants", tenant_id, *parts))


@dataclass(frozen=True, slots=True)
class DirectoryStore:
    folder: Path

    def put(self, name: str, file: Path, media_type: str, sha256: str) -> str:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f".{target.name}.part")
        try:
            with file.open("rb") as source, beside.open("wb") as copy:
                shutil.copyfileobj(source, copy)
                copy.flush()
                os.fsync(copy.fileno())
            beside.replace(target)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        return str(target)

    def probe(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".probe"):
            pass


@dataclass(frozen=True, slots=True)
class S3Store:
    bucket: str
    prefix: str
    endpoint: str = ""  # empty: AWS

    def put(self, name: str, file: Path, media_type: str, sha256: str) -> str:
        key = f"{self.prefix}/{name}" if self.prefix else name
        about = {"ContentType": media_type, "Metadata": {"sha256": sha256}}
        upload = partial(self.client().upload_file, str(file), self.bucket, key, ExtraArgs=about)
        seconds = _SHORT_S + file.stat().st_size / _LEAST_RATE
        within(upload, seconds, f"the upload to s3://{self.bucket}/{key}")
        return f"s3://{self.bucket}/{key}"

    def probe(self) -> None:
        look = partial(self.client().head_bucket, Bucket=self.bucket)
        within(look, _SHORT_S, f"a look at s3://{self.bucket}")

    def client(self) -> Any:
        with imports_of("s3", "An S3 destination"):
            boto3 = importlib.import_module("boto3")
            config = importlib.import_module("botocore.config")
        chosen = config.Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
            # Stores other than AWS often do not support bucket host names.
            s3={"addressing_style": "path"} if self.endpoint else {},
        )
        session = boto3.session.Session()
        region = session.region_name or "us-east-1"
        return session.client(
            "s3", endpoint_url=self.endpoint or None, region_name=region, config=chosen
        )
