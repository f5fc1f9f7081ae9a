"""Downloads of archives. An archive's file has no name, so that the disk has its bytes back as soon as
the file is closed, also after a crash; and it is closed at a deadline, however slowly it is read."""

import asyncio
import io
import logging
import shutil
import tempfile
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import Conflict, RateLimited, Unavailable
from core.tenants.scope import TenantScope
from gateway.admin.stored_data.stored_data import StoredData
from gateway.edge.threads import Work, run_queued

MOST_ARCHIVES = 2  # of a tenant in a process, from the first byte written to the last one read
KEPT_S = 3600.0  # of an archive, writing and reading
RESERVE = 1 << 30  # bytes of the disk that archives leave free
_LOOK_EVERY = 16 << 20  # bytes between two looks at the disk
_PIECE = 256 << 10
_RETRY_S = 60.0

log = logging.getLogger("tollhouse.archives")


class Archive(io.RawIOBase):
    """A temporary file and its place among the tenant's archives, which ends with it."""

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id = tenant_id
        self._lock = threading.RLock()  # a closed file's descriptor may soon be another file's
        self._unseen = _LOOK_EVERY
        _take(tenant_id)
        try:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed by `close`
        except BaseException:
            _release(tenant_id)
            raise

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        with self._lock:
            self._refuse_closed()
            self._unseen += size
            if self._unseen >= _LOOK_EVERY:
                self._unseen = 0
                _refuse_full_disk()
            while rest:
                rest = rest[self._file.write(rest) :]
        return size

    def read(self, size: int = -1) -> bytes:
        with self._lock:
            self._refuse_closed()
            return self._file.read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with self._lock:
            self._refuse_closed()
            return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self.seek(0, io.SEEK_CUR)

    def close(self) -> None:
        """From any thread, at any time: what writes it ends with an error."""
        with self._lock:
            if not self.closed:
                self._file.close()
                _release(self.tenant_id)
                super().close()

    def _refuse_closed(self) -> None:
        if self.closed:
            raise Conflict(
                f"The export has ended: its reader left, or it took more than {KEPT_S / 60:.0f} minutes.",
                next_step="Export again, on a faster connection or with `tollhouse tenant export`.",
            )


class Download(Response):
    """The archive, until it is read or its time is over."""

    media_type = "application/zip"

    def __init__(self, archive: Archive, end: asyncio.TimerHandle) -> None:
        self._archive, self._end = archive, end
        self._size = archive.seek(0, io.SEEK_END)
        archive.seek(0)
        headers = {
            "content-length": str(self._size),
            "content-disposition": f'attachment; filename="{archive.tenant_id}.zip"',
        }
        super().__init__(None, headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._end.when()):
                await self._send(send)
        except (TimeoutError, Conflict):
            # The answer ends before its length, which its reader sees.
            log.warning(
                "the download of an export of %s took more than %.0f s and was ended",
                self._archive.tenant_id,
                KEPT_S,
            )
        finally:
            self._end.cancel()
            self._archive.close()

    async def _send(self, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": 200, "headers": self.raw_headers},
        )
        more = True
        while more:
            piece = await asyncio.to_thread(self._archive.read, _PIECE)
            more = len(piece) == _PIECE
            await send({"type": "http.response.body", "body": piece, "more_body": more})


async def download(stored: StoredData, scope: TenantScope) -> Response:
    """RateLimited if the tenant has as many archives as it may."""
    archive = Archive(scope.tenant_id)
    # Also for an answer that is never sent, because its request was cancelled meanwhile.
    end = asyncio.get_running_loop().call_later(KEPT_S, archive.close)
    try:
        work = partial(stored.export, scope, archive)
        await run_queued(Work.EXPORTS, scope.tenant_id, MOST_ARCHIVES, work)
        return Download(archive, end)
    except BaseException:
        end.cancel()
        archive.close()
        raise


_open: Counter[str] = Counter()
_open_lock = threading.Lock()


def _take(tenant_id: str) -> None:
    with _open_lock:
        if _open[tenant_id] >= MOST_ARCHIVES:
            raise RateLimited(
                f"{MOST_ARCHIVES} exports of the organisation are being written or downloaded, the "
                "maximum.",
                next_step="Send this one again when they have ended.",
                code="too_many_exports",
                retry_after_s=_RETRY_S,
            )
        _open[tenant_id] += 1


def _release(tenant_id: str) -> None:
    with _open_lock:
        _open[tenant_id] -= 1
        if not _open[tenant_id]:
            del _open[tenant_id]


def _refuse_full_disk() -> None:
    folder = Path(tempfile.gettempdir())
    free = shutil.disk_usage(folder).free
    if free < RESERVE:
        raise Unavailable(
            "The export does not fit on the gateway's disk for temporary files.",
            next_step="Try again later. The operator frees disk space, or names a larger disk by TMPDIR.",
            code="no_room_for_export",
            retry_after_s=_RETRY_S,
        )
