"""Where marks and erasures are kept outside the database: a folder of the data directory and, where
TOLLHOUSE_RESTORE_STORE names one, a shared directory or a bucket.
"""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from billing.stores import S3Store, open_store
from core.settings import Settings
from core.waiting import within

FOLDER = "restore"
_WHOLE_S = 30.0  # for one exchange with a bucket


class Place(Protocol):
    def write(self, name: str, body: bytes) -> None:
        """Replace the file as a whole. Raises the place's own errors."""
        ...

    def read(self, name: str) -> bytes | None:
        """None if there is no such file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Of the files in a folder, with its name."""
        ...

    def remove(self, name: str) -> None:
        """Nothing if there is no such file."""
        ...


def local(settings: Settings) -> Place:
    return Directory(settings.data_dir / FOLDER)


def shared(settings: Settings) -> Place | None:
    if not settings.restore_store:
        return None
    store = open_store(settings.restore_store, settings)
    return Bucket(store) if isinstance(store, S3Store) else Directory(Path(settings.restore_store))


@dataclass(frozen=True, slots=True)
class Directory:
    folder: Path

    def write(self, name: str, body: bytes) -> None:
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            descriptor = os.open(part, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(body)
                file.flush()
                os.fsync(file.fileno())
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def read(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        where = self.folder / folder
        if not where.is_dir():
            return []
        return sorted(f"{folder}/{each.name}" for each in where.iterdir() if each.name[0] != ".")

    def remove(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Bucket:
    store: S3Store

    def write(self, name: str, body: bytes) -> None:
        put = partial(
            self.store.client().put_object, Bucket=self.store.bucket, Key=self._key(name), Body=body
        )
        within(put, _WHOLE_S, f"writing {name} to s3://{self.store.bucket}")

    def read(self, name: str) -> bytes | None:
        return within(
            partial(self._read, name), _WHOLE_S, f"reading {name} of s3://{self.store.bucket}"
        )

    def _read(self, name: str) -> bytes | None:
        client = self.store.client()
        try:
            found = client.get_object(Bucket=self.store.bucket, Key=self._key(name))
        except client.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def names(self, folder: str) -> list[str]:
        start = self._key(folder) + "/"
        pages = self.store.client().get_paginator("list_objects_v2")
        keys = [
            str(each["Key"])
            for page in pages.paginate(Bucket=self.store.bucket, Prefix=start)
            for each in page.get("Contents", ())
        ]
        return [f"{folder}/{key.removeprefix(start)}" for key in sorted(keys)]

    def remove(self, name: str) -> None:
        self.store.client().delete_object(Bucket=self.store.bucket, Key=self._key(name))

    def _key(self, name: str) -> str:
        return f"{self.store.prefix}/{name}" if self.store.prefix else name
