"""Issue 14, part 8: an adapter's archive costs the gateway no more memory than its size explains.

Archives of a few kilobytes claim headers of many megabytes, hundreds of thousands of entries, or
dictionaries of gigabytes. They are refused, and the gateway's own allocations stay small meanwhile.
"""

import gzip
import io
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest

from core.errors import BadRequest
from engine.adapters.digest import CONFIG, WEIGHTS
from gateway.catalog.adapter_store import AdapterStore

BOUND = 16 * 2**20  # bytes that the gateway may allocate meanwhile


def _pax(size: int) -> bytes:
    """A tar whose extended header is one record of `size` bytes."""
    record = b"%d comment=" % size
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, size
    content = record + bytes(size - len(record) - 1) + b"\n"
    file = tarfile.TarInfo(CONFIG)
    return header.tobuf() + content + bytes(-size % 512) + file.tobuf() + bytes(1024)


def _long_name(size: int) -> bytes:
    header = tarfile.TarInfo("././@LongLink")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, size
    return header.tobuf() + b"a" * size + bytes(-size % 512) + bytes(1024)


def _many_entries(entries: int, claimed: int) -> bytes:
    """A zip that is nothing but its directory, with `claimed` entries by its own account."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[0] * 9, 1, *[0] * 6) + b"a"
    directory = entry * entries
    return directory + struct.pack(
        "<4s4H2LH", b"PK\5\6", 0, 0, claimed, claimed, len(directory), 0, 0
    )


def _many_files(entries: int) -> bytes:
    return b"".join(tarfile.TarInfo(f"{n}").tobuf() for n in range(entries)) + bytes(1024)


def _large_dictionary() -> bytes:
    """An LZMA member that claims a dictionary of 2 GiB."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr(CONFIG, b"{}")
    properties = b"\5\0\x5d"  # their length, and the first
    before, _, after = made.getvalue().partition(properties)
    return before + properties + struct.pack("<L", 2**31 - 1) + after[4:]


ARCHIVES = {  # made where they are used: every test process reads this file
    "PAX header": (lambda: gzip.compress(_pax(100 * 2**20)), "header"),
    "long name": (lambda: gzip.compress(_long_name(100 * 2**20)), "header"),
    "entries of a zip": (lambda: _many_entries(100_000, 65_535), "members"),
    "unclaimed entries of a zip": (lambda: _many_entries(100_000, 1), "directory"),
    "entries of a tar": (lambda: gzip.compress(_many_files(50_000)), "one too many"),
    "dictionary": (_large_dictionary, "memory"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_a_small_archive_costs_little_and_is_refused(tmp_path: Path, name: str) -> None:
    made, reason = ARCHIVES[name]
    content = made()
    store = AdapterStore(tmp_path, ())
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest) as refused, store.from_archive(io.BytesIO(content)):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < BOUND + len(content), f"{peak:,} bytes for an archive of {len(content):,}"
    assert reason in refused.value.message
    assert not list(tmp_path.iterdir())


def test_content_that_expands_beyond_any_adapter_is_refused(tmp_path: Path) -> None:
    skipped = tarfile.TarInfo("README.md")
    skipped.size = 2**28
    bomb = gzip.compress(skipped.tobuf() + bytes(2**28) + bytes(1024))
    store = AdapterStore(tmp_path, ())
    with pytest.raises(BadRequest) as refused, store.from_archive(io.BytesIO(bomb)):
        pass
    assert "times its size" in refused.value.message


def test_weights_with_a_header_of_gigabytes_are_not_parsed(tmp_path: Path) -> None:
    files = {CONFIG: b'{"r": 4}', WEIGHTS: struct.pack("<Q", 90_000_000) + b"{}"}
    store, config = AdapterStore(tmp_path, ()), io.BytesIO(files[CONFIG])
    with pytest.raises(BadRequest) as refused, store.from_files(config, io.BytesIO(files[WEIGHTS])):
        pass
    assert "safetensors" in refused.value.message


def test_an_archive_of_a_kind_that_is_read_in_time_only_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.catalog.adapter_store._UNPACK_S", 0.001)
    store = AdapterStore(tmp_path, ())
    with pytest.raises(BadRequest) as refused, store.from_archive(io.BytesIO(_pax(1024))):
        pass
    assert "seconds" in refused.value.message
