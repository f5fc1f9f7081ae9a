"""Adapters by upload and by path: what is taken, and what a hostile one is answered."""

import fcntl
import gzip
import io
import json
import pickle
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save
from sqlalchemy import select

from core.tenants.models import Adapter
from engine.adapters.digest import CONFIG, WEIGHTS
from engine.demo.paths import ADAPTERS, MODEL_DIR
from engine.models.registry import model_spec, read_config
from gateway.catalog import adapter_store
from gateway.catalog.adapter_registry import AdapterRegistry
from gateway.catalog.adapter_store import AdapterStore
from tests.gateway.admin.conftest import Town

BASE = "tiny"


def _config(alpha: int = 16) -> bytes:
    return json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": alpha}).encode()


def _weights() -> bytes:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    return save({name: numpy.zeros((4, 8), numpy.float32)})


def _tar(members: dict[str, bytes], mode: str = "w:gz") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def _zip(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _upload(town: Town, name: str, archive: bytes, role: str = "developer") -> Any:
    return town.call(
        "POST",
        "/admin/v1/adapters",
        town.acme.keys[role],
        data={"name": name, "base_model": BASE},
        files={"file": ("adapter", archive)},
    )


GOOD = {CONFIG: _config(), WEIGHTS: _weights(), "README.md": b"words"}


def test_a_field_that_no_engine_serves_is_refused_by_name(town: Town) -> None:
    config = json.loads(_config()) | {"trainable_token_indices": [3]}
    archive = _tar({CONFIG: json.dumps(config).encode(), WEIGHTS: _weights()})
    answer = _upload(town, "indices", archive)
    assert answer.status_code == 400
    assert "trainable_token_indices is set" in answer.json()["error"]["message"]
    assert "indices" not in town.call("GET", "/v1/models", town.acme.keys["viewer"]).text


def test_shapes_of_another_base_are_refused_with_the_tensors_name(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is registered, not when the engine loads it for the first request."""
    catalog = town.services.catalog
    own = catalog.served(BASE)
    assert own is not None
    spec = model_spec(read_config(MODEL_DIR))
    monkeypatch.setattr(catalog, "served", lambda _: replace(own, spec=spec))
    answer = _upload(town, "foreign", _tar(GOOD))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_adapter"
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert f"tensor {name} has shape [4, 8], the base model needs [rank, 256]" in error["message"]
    assert str(town.services.settings.data_dir) not in answer.text
    assert "foreign" not in town.call("GET", "/v1/models", town.acme.keys["viewer"]).text
    files = {n: (ADAPTERS["json"] / n).read_bytes() for n in (CONFIG, WEIGHTS)}
    assert _upload(town, "fitting", _tar(files)).status_code == 201


def test_what_an_upstream_may_serve_is_stored_for_its_model(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine decides for itself which of PEFT's fields it serves."""
    catalog = town.services.catalog
    own = catalog.served(BASE)
    assert own is not None
    monkeypatch.setattr(catalog, "served", lambda _: replace(own, parameters=frozenset()))
    config = json.loads(_config()) | {"target_parameters": ["mlp.experts.down_proj"]}
    archive = _tar({CONFIG: json.dumps(config).encode(), WEIGHTS: _weights()})
    assert _upload(town, "parameters", archive).status_code == 201


@pytest.mark.parametrize(
    ("name", "archive"),
    [
        ("by-tar", _tar(GOOD)),
        ("by-plain-tar", _tar(GOOD, "w")),
        ("by-zip", _zip({f"folder/{name}": content for name, content in GOOD.items()})),
    ],
)
def test_an_archive_becomes_an_adapter_of_its_tenant_alone(
    town: Town, name: str, archive: bytes
) -> None:
    made = _upload(town, name, archive)
    assert made.status_code == 201, made.text
    assert (made.json()["rank"], made.json()["base_model"]) == (4, BASE)
    assert f"{BASE}:{name}" in town.call("GET", "/v1/models", town.acme.keys["viewer"]).text
    assert name not in town.call("GET", "/v1/models", town.rival.keys["owner"]).text
    foreign = town.call("DELETE", f"/admin/v1/adapters/{name}", town.rival.keys["owner"])
    assert foreign.status_code == 404
    assert town.call("DELETE", f"/admin/v1/adapters/{name}", town.acme.keys["owner"]).is_success
    assert f"{BASE}:{name}" not in town.call("GET", "/v1/models", town.acme.keys["viewer"]).text


def test_two_files_do_as_well_and_another_alpha_is_another_adapter(town: Town) -> None:
    digests = []
    for alpha in (16, 32):
        answer = town.call(
            "POST",
            "/admin/v1/adapters",
            town.acme.keys["owner"],
            data={"name": f"alpha-{alpha}"},
            files={"config": ("c", _config(alpha)), "weights": ("w", _weights())},
        )
        assert answer.status_code == 201, answer.text
        digests.append(answer.json()["digest"])
    assert digests[0] != digests[1]


def test_a_name_keeps_its_weights(town: Town) -> None:
    assert _upload(town, "steady", _tar(GOOD)).status_code == 201
    assert _upload(town, "steady", _tar(GOOD)).status_code == 201
    other = _tar(GOOD | {CONFIG: _config(64)})
    assert _upload(town, "steady", other).status_code == 409


def test_a_refused_upload_leaves_the_files_of_another_one_of_the_same_weights(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal of the first comes while the second is stored, and finds no adapter that names the
    files yet: it may not delete those of the second."""
    archive = _tar(GOOD | {CONFIG: _config(7)})
    assert _upload(town, "taken", _tar(GOOD)).status_code == 201
    refused, unpacked = threading.Event(), threading.Event()
    plain = AdapterRegistry.register

    def _register(self: Any, scope: Any, name: str, base_model: str, files: Any) -> Any:
        if name == "second":
            unpacked.set()
            assert refused.wait(60)
        return plain(self, scope, name, base_model, files)

    monkeypatch.setattr(AdapterRegistry, "register", _register)
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(_upload, town, "second", archive)
        assert unpacked.wait(60)
        answer = _upload(town, "taken", archive)
        refused.set()
    assert answer.status_code == 409
    assert second.result().status_code == 201
    root = town.services.settings.data_dir / "adapters"
    kept = next(root.rglob(second.result().json()["digest"]))
    assert {each.name for each in kept.iterdir()} >= {CONFIG, WEIGHTS}


def test_an_uploads_path_is_relative_to_the_data_directory(town: Town) -> None:
    assert _upload(town, "relative", _tar(GOOD)).status_code == 201
    with town.services.database.read() as session:
        row = session.scalars(select(Adapter).where(Adapter.name == "relative")).one()
    assert row.path == f"{row.tenant_id}/{row.digest}"
    shown = town.services.pipeline.catalog.every_adapter()
    [named] = [each for each in shown if each.name == "relative"]
    root = (town.services.settings.data_dir / "adapters").resolve()
    assert Path(named.path) == root / row.tenant_id / row.digest


def test_a_copied_data_directory_finds_its_adapters(tmp_path: Path) -> None:
    for place in ("before", "after"):
        (tmp_path / place / "acme" / "digest").mkdir(parents=True)
    old, new = str(tmp_path / "before" / "acme" / "digest"), tmp_path / "after"
    store = AdapterStore(new, ())
    for stored in ("acme/digest", old):
        assert store.found_path(stored, "acme", "digest") == str(new / "acme" / "digest"), stored
    own = str(tmp_path / "operators" / "digest")
    assert store.found_path(own, "acme", "digest") == own
    (new / "acme" / "digest").rmdir()
    assert store.found_path(old, "acme", "digest") == old, "it was not copied"


def test_files_are_kept_and_discarded_one_after_the_other(tmp_path: Path) -> None:
    """By one process or several: a lock of the file system is held."""
    store, own = AdapterStore(tmp_path, ()), tmp_path / "tenant" / ".lock"
    with store.locked("tenant"), own.open("rb") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with store.locked("tenant"), store.locked("other"):
        pass
    with own.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _linked() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        link = tarfile.TarInfo(WEIGHTS)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("archive", "reason"),
    [
        (_tar({"../" + CONFIG: _config(), WEIGHTS: _weights()}), "member"),
        (_tar({"/etc/" + CONFIG: _config(), WEIGHTS: _weights()}), "member"),
        (_zip({"..\\" + CONFIG: _config(), WEIGHTS: _weights()}), "member"),
        (_tar(GOOD | {"adapter_model.bin": pickle.dumps({})}), "pickle"),
        (_tar({CONFIG: _config(), WEIGHTS: pickle.dumps({"a": 1})}), "safetensors"),
        (_tar({CONFIG: _config(), WEIGHTS: _weights()[:-8]}), "safetensors"),
        (_tar({CONFIG: b"[]", WEIGHTS: _weights()}), "JSON object"),
        (_tar({CONFIG: b"[" * 100_000, WEIGHTS: _weights()}), "adapter"),
        (_tar({CONFIG: _config()}), WEIGHTS),
        (_tar({"a/" + CONFIG: _config(), "b/" + CONFIG: _config()}), "twice"),
        (_linked(), "link"),
        (_tar(GOOD)[:200], "tar or zip"),
        (b"not an archive", "tar or zip"),
    ],
)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    town: Town, archive: bytes, reason: str
) -> None:
    answer = _upload(town, "hostile", archive)
    assert answer.status_code == 400, answer.text
    assert reason in answer.json()["error"]["message"]
    root = town.services.settings.data_dir / "adapters"
    assert not list(root.glob(".upload-*"))
    assert str(root) not in answer.text


def test_a_decompression_bomb_stops_at_the_cap(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_store, "MAX_BYTES", 2**20)
    bomb = _tar({CONFIG: _config(), WEIGHTS: bytes(64 * 2**20)})
    assert len(bomb) < 2**20
    assert _upload(town, "bomb", bomb).status_code == 413
    lying = io.BytesIO()
    with zipfile.ZipFile(lying, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(CONFIG, bytes(8 * 2**20))
    assert _upload(town, "bomb", lying.getvalue()).status_code == 413
    assert _upload(town, "bomb", gzip.compress(bytes(2**20))).status_code == 400


def test_a_body_past_the_cap_is_cut_off(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admin.adapters.routes.MAX_UPLOAD_BYTES", 2**20)
    assert _upload(town, "large", bytes(2 * 2**20)).status_code == 413


def test_a_path_loads_only_from_the_operators_directories(town: Town, tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for place in (inside / "good", outside / "good"):
        place.mkdir(parents=True)
        (place / CONFIG).write_bytes(_config())
        (place / WEIGHTS).write_bytes(_weights())
    (inside / "link").symlink_to(outside / "good")
    services = town.services
    store = AdapterStore(services.settings.data_dir / "adapters", (inside,))
    services.adapters = replace(services.adapters, store=store)
    owner = town.acme.keys["owner"]
    for path in (
        str(outside / "good"),
        str(inside / ".." / "outside" / "good"),
        str(inside / "link"),
        str(inside / "missing"),
        "/etc",
        "nul\0byte",
    ):
        body = {"lora_name": "sly", "lora_path": path}
        answer = town.call("POST", "/v1/load_lora_adapter", owner, json=body)
        assert answer.status_code == 403, (path, answer.text)
        assert "is not below a directory from which" in answer.text
    body = {"lora_name": "walked-in", "lora_path": str(inside / "good")}
    assert town.call("POST", "/v1/load_lora_adapter", owner, json=body).is_success
    viewer = town.acme.keys["viewer"]
    assert town.call("POST", "/v1/load_lora_adapter", viewer, json=body).status_code == 403
    gone = {"lora_name": "walked-in"}
    assert (
        town.call(
            "POST", "/v1/unload_lora_adapter", town.rival.keys["owner"], json=gone
        ).status_code
        == 404
    )
    assert town.call("POST", "/v1/unload_lora_adapter", owner, json=gone).is_success
