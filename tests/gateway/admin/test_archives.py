"""The file of an export ends with its reader, its time or its room, and a tenant has a few at most."""

import asyncio
import io
import os
import shutil
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import pytest
from starlette.responses import Response

from core.errors import Conflict, RateLimited, Unavailable
from core.tenants.scope import TenantScope, scope_of_operator
from gateway.admin.stored_data import archives
from gateway.admin.stored_data.archives import MOST_ARCHIVES, Archive, download
from gateway.admin.stored_data.stored_data import StoredData

SCOPE = scope_of_operator("tenant_a")
CONTENT = os.urandom(700_000)


class _Stored:
    """Writes an archive in two parts, and waits between them where the test says so."""

    def __init__(self, waits: bool = False) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.ended: list[BaseException | None] = []
        if not waits:
            self.go.set()

    def export(self, scope: TenantScope, target: IO[bytes]) -> dict[str, int]:
        try:
            with zipfile.ZipFile(target, "w") as archive:
                archive.writestr("one", CONTENT)
                self.begun.set()
                assert self.go.wait(60)
                archive.writestr("two", CONTENT)
        except BaseException as error:
            self.ended.append(error)
            raise
        self.ended.append(None)
        return {}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == [], "a file without a name leaves nothing"
    assert not archives._open, "and every place is free again"


async def _download(stored: _Stored) -> Response:
    return await download(cast(StoredData, stored), SCOPE)


async def _read(answer: Response) -> tuple[dict[str, str], bytes]:
    sent: list[Any] = []

    async def _send(message: Any) -> None:
        sent.append(message)

    await answer({"type": "http"}, None, _send)  # type: ignore[arg-type]
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return headers, b"".join(message["body"] for message in sent[1:])


def test_the_archive_is_read_whole() -> None:
    headers, body = asyncio.run(_whole())
    assert headers["content-length"] == str(len(body))
    assert headers["content-type"] == "application/zip"
    assert headers["content-disposition"] == 'attachment; filename="tenant_a.zip"'
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert archive.read("one") == archive.read("two") == CONTENT


async def _whole() -> tuple[dict[str, str], bytes]:
    return await _read(await _download(_Stored()))


def test_a_reader_that_does_not_read_loses_the_file_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(archives, "KEPT_S", 0.2)

    async def _unread() -> None:
        answer = await _download(_Stored())
        assert list(folder.iterdir()) == []

        async def _never(message: Any) -> None:
            await asyncio.Event().wait()

        await answer({"type": "http"}, None, _never)  # type: ignore[arg-type]

    asyncio.run(_unread())


def test_an_answer_that_is_never_sent_loses_the_file_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(archives, "KEPT_S", 0.2)

    async def _dropped() -> None:
        await _download(_Stored())
        while archives._open:
            await asyncio.sleep(0.01)

    asyncio.run(_dropped())


def test_what_is_written_for_a_caller_that_left_stops() -> None:
    stored = _Stored(waits=True)

    async def _left() -> None:
        running = asyncio.create_task(_download(stored))
        await asyncio.to_thread(stored.begun.wait, 60)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        assert not archives._open
        stored.go.set()
        while not stored.ended:
            await asyncio.sleep(0.01)

    asyncio.run(_left())
    [error] = stored.ended
    assert isinstance(error, Conflict) and "Export again" in error.next_step


def test_a_tenant_has_a_few_until_they_are_read() -> None:
    async def _many() -> None:
        held = [await _download(_Stored()) for _ in range(MOST_ARCHIVES)]
        with pytest.raises(RateLimited) as refused:
            await _download(_Stored())
        assert refused.value.code == "too_many_exports" and refused.value.retry_after_s
        Archive("tenant_b").close()
        await _read(held.pop())
        await _read(await _download(_Stored()))
        await _read(held.pop())

    asyncio.run(_many())


def test_a_disk_keeps_its_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(".")._replace(free=archives.RESERVE - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(Unavailable) as refused:
        asyncio.run(_download(_Stored()))
    assert refused.value.code == "no_room_for_export"
