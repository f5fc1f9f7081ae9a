"""Downloads of weights resume: a hub on this machine cuts them, ignores ranges or changes its file."""

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants

from gateway.catalog import hub_download
from gateway.catalog.hub_download import Mismatch, prefetch
from tests.gateway.catalog.stub_hub import REPOSITORY, StubHub, stub_hub

WEIGHTS = bytes(range(251)) * 800
PART = 60_000
OTHER = WEIGHTS[::-1]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    with stub_hub({"config.json": b"{}", "model.safetensors": WEIGHTS}) as made:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, made.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(hub_download, "_PAUSE_S", 0.0)
        yield made


def fetch() -> None:
    prefetch(REPOSITORY, ["*.safetensors"], [])


def blobs(tmp_path: Path) -> dict[str, bytes]:
    found = (tmp_path / "models--someone--tiny" / "blobs").iterdir()
    return {path.name: path.read_bytes() for path in found}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def part(tmp_path: Path, data: bytes, of: bytes = WEIGHTS) -> Path:
    """What an earlier try left."""
    file = tmp_path / "models--someone--tiny" / "blobs" / f"{sha256(of)}.part"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


def test_a_connection_that_is_cut_goes_on_where_it_ended(hub: StubHub, tmp_path: Path) -> None:
    hub.most = PART
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS}
    assert hub.asked == ["", *(f"bytes={PART * n}-" for n in (1, 2, 3))]


def test_the_next_try_begins_after_what_the_last_one_kept(hub: StubHub, tmp_path: Path) -> None:
    part(tmp_path, WEIGHTS[:PART])
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS} and hub.asked == [f"bytes={PART}-"]


def test_a_hub_that_fails_leaves_the_part_for_the_next_try(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.most, hub.ranges = PART, "ignored"  # never comes further than the first part
    with pytest.raises(Exception) as error:
        fetch()
    assert type(error.value).__module__.startswith("httpx")
    assert blobs(tmp_path) == {f"{sha256(WEIGHTS)}.part": WEIGHTS[:PART]}
    hub.most, hub.ranges = 0, "honoured"
    hub.asked.clear()
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS} and hub.asked == [f"bytes={PART}-"]


@pytest.mark.parametrize("ranges", ["ignored", "wrong", "refused"])
def test_a_server_without_right_ranges_sends_the_whole_file_once_more(
    hub: StubHub, tmp_path: Path, ranges: str
) -> None:
    part(tmp_path, b"x" * PART)
    hub.ranges = ranges
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS}
    assert hub.asked[0] == f"bytes={PART}-"


def test_a_file_that_changed_on_the_hub_begins_anew(hub: StubHub, tmp_path: Path) -> None:
    part(tmp_path, WEIGHTS[:PART])
    hub.files["model.safetensors"] = OTHER
    fetch()
    assert blobs(tmp_path) == {sha256(OTHER): OTHER} and hub.asked == [""]


def test_a_part_that_was_spoilt_is_found_by_the_checksum(hub: StubHub, tmp_path: Path) -> None:
    part(tmp_path, b"x" * PART)
    with pytest.raises(Mismatch, match=r"model\.safetensors"):
        fetch()
    assert blobs(tmp_path) == {}
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS}


def test_a_part_that_is_too_long_begins_anew(hub: StubHub, tmp_path: Path) -> None:
    part(tmp_path, WEIGHTS + b"more")
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS} and hub.asked == [""]


def test_a_part_that_is_whole_is_only_checked(hub: StubHub, tmp_path: Path) -> None:
    part(tmp_path, WEIGHTS)
    fetch()
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS} and hub.asked == []


def test_a_file_that_is_there_is_not_fetched_again(hub: StubHub, tmp_path: Path) -> None:
    fetch()
    hub.asked.clear()
    fetch()
    assert hub.asked == [] and list(blobs(tmp_path)) == [sha256(WEIGHTS)]


def test_a_disk_without_room_is_refused_before_the_first_byte(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(WEIGHTS) - 1))
    with pytest.raises(OSError, match=r"model\.safetensors") as error:
        fetch()
    assert error.value.errno == errno.ENOSPC and hub.asked == [] and blobs(tmp_path) == {}


def test_a_second_process_waits_for_the_first(hub: StubHub, tmp_path: Path) -> None:
    hub.most = PART  # the first needs several connections
    child = os.fork()
    if child == 0:
        try:
            fetch()
        except BaseException:
            os._exit(1)
        os._exit(0)
    fetch()
    assert os.waitpid(child, 0)[1] == 0
    assert blobs(tmp_path) == {sha256(WEIGHTS): WEIGHTS}
    assert len(hub.asked) == 4, "each byte is fetched once"
