"""The tier in a store that speaks S3, shared by engines. The bucket's lifecycle rules bound its size; a
block older than the time to live is not read, and is removed when it is met."""

import importlib
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from typing import Any
from urllib.parse import parse_qs, urlsplit

from engine.errors import ConfigError
from engine.extras import imports_of
from engine.tiers.tier import RemoteTier

_TIMEOUT_S = 2.0
_READS = 32  # blocks of one call
_TOGETHER = 16  # requests at once
_AT_ONCE = 1000  # objects that one call removes, as S3 limits it


class S3Tier(RemoteTier):
    """Implements `engine.tiers.tier.Tier`. Credentials are found as boto3 does."""

    def __init__(self, url: str, ttl_s: float) -> None:
        """url: s3://bucket/prefix, with ?endpoint=URL for a store other than AWS's."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        if parts.scheme != "s3" or not parts.netloc or set(query) - {"endpoint"}:
            raise ConfigError(
                f"tier_remote is {url!r}: use s3://bucket/prefix, with ?endpoint=URL for a store "
                "other than AWS's"
            )
        self._bucket = parts.netloc
        self._prefix = f"{parts.path.strip('/')}/".removeprefix("/")
        self._ttl = timedelta(seconds=ttl_s)
        self._client = _client(query.get("endpoint", [""])[0])
        self._readers = ThreadPoolExecutor(_TOGETHER, "kv-tier-s3")

    def read(self, names: list[str]) -> list[bytes]:
        """Each is a request of its own: the first alone, because most prompts have no copy, then the
        others at once."""
        places = [self._place(name) for name in names[:_READS]]
        first = self._read(places[0]) if places else None
        if first is None:
            return []
        others = self._readers.map(self._read, places[1:])
        return [first, *takewhile(lambda data: data is not None, others)]  # type: ignore[list-item]

    def _read(self, place: dict[str, str]) -> bytes | None:
        try:
            found = self._client.get_object(**place)
        except self._client.exceptions.NoSuchKey:
            return None
        with found["Body"] as body:
            data: bytes = body.read()
        if datetime.now(UTC) - found["LastModified"] <= self._ttl:
            return data
        self._client.delete_object(**place)
        return None

    def write(self, name: str, data: bytes) -> list[str]:
        self._client.put_object(**self._place(name), Body=data)
        return []

    def erase(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket,
            Prefix=self._prefix + prefix,
            PaginationConfig={"PageSize": _AT_ONCE},
        )
        for page in pages:
            keys = [{"Key": each["Key"]} for each in page.get("Contents", ())]
            if keys:
                removed = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True}
                )
                for failed in removed.get("Errors", ()):
                    raise OSError(f"s3://{self._bucket}/{failed['Key']}: {failed['Message']}")
        return []

    def discard(self, name: str) -> None:
        self._client.delete_object(**self._place(name))

    def close(self) -> None:
        self._readers.shutdown(cancel_futures=True)
        self._client.close()

    def _place(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}


def _client(endpoint: str) -> Any:
    with imports_of("s3", "A tier in S3"):
        boto3 = importlib.import_module("boto3")
        config = importlib.import_module("botocore.config")
    chosen = config.Config(
        connect_timeout=_TIMEOUT_S,
        max_pool_connections=_TOGETHER + 2,  # plus a read of a first block and a write
        read_timeout=_TIMEOUT_S,
        retries={"max_attempts": 1, "mode": "standard"},  # the caller leaves the tier out meanwhile
        s3={"addressing_style": "path"} if endpoint else {},
    )
    session = boto3.session.Session()
    return session.client(
        "s3", endpoint_url=endpoint or None, region_name=session.region_name or "us-east-1",
        config=chosen,
    )  # fmt: skip
