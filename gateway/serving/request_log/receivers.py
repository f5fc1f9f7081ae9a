"""Delivers a batch of records: to a webhook, or as an object of a bucket. Blocking; run in a thread."""

import gzip
import hashlib
import json
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from billing.notices import signing
from billing.notices.request_sinks import OTLP, Sink
from billing.stores import open_store
from core.errors import TollhouseError
from core.ids import new_id
from core.outbound import encode_json, post_json
from core.sealed_columns import check_opened
from core.settings import Settings
from gateway.serving.request_log.otlp import traces_of

Record = dict[str, Any]
_TIMEOUT_S = 10.0


class Receivers:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def deliver(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        """What went wrong; empty if the batch was delivered."""
        if sink.is_bucket:
            return self._put(tenant_id, sink, batch, now)
        return self._post(tenant_id, sink, batch, now)

    def _post(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        body: Record = {
            "event": "requests",
            "tenant_id": tenant_id,
            "at": now.isoformat(),
            "records": batch,
        }
        if sink.format == OTLP:
            body = traces_of(batch, now)
        message_id = new_id("log")
        try:
            # Lone surrogates and other values that JSON has not are replaced, not fatal.
            body = json.loads(json.dumps(body, default=str))
            headers = dict(signing.headers(sink.secret, message_id, now, encode_json(body)))
            if sink.authorization:
                headers["authorization"] = check_opened(
                    sink.authorization, "The authorization of the receiver"
                )
            status = post_json(
                sink.url,
                body,
                headers,
                timeout_s=_TIMEOUT_S,
                private=self._settings.webhook_networks,
            )
        except (TollhouseError, OSError, ValueError) as error:
            return str(error)[:200] or type(error).__name__
        return "" if status < 300 else f"the receiver returned status {status}"

    def _put(self, tenant_id: str, sink: Sink, batch: Sequence[Record], now: datetime) -> str:
        """One object of JSON lines, by tenant and hour: tools that read logs prune by such names."""
        lines = "".join(json.dumps(each, default=str) + "\n" for each in batch)
        body = gzip.compress(lines.encode(), compresslevel=5)
        name = f"{tenant_id}/{now:%Y/%m/%d/%H}/{new_id('log')}.jsonl.gz"
        try:
            with tempfile.NamedTemporaryFile() as file:
                file.write(body)
                file.flush()
                digest = hashlib.sha256(body).hexdigest()
                store = open_store(sink.url, self._settings)
                store.put(name, Path(file.name), "application/gzip", digest)
        except Exception as error:  # the store's own errors
            return str(error)[:200] or type(error).__name__
        return ""
