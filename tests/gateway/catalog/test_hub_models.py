"""`tollhouse model fetch owner/name` with the real hub client against a hub on this machine."""

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.catalog.stub_hub import REPOSITORY, StubHub, stub_hub

PROTECTS = ("gateway/catalog",)
ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.proof
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
WEIGHTS = bytes(range(256)) * 400
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{ }",
    "chat_template.jinja": b"x",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"a second copy",
    "original/model.safetensors": b"a third copy",
    "onnx/model.onnx": b"onnx",
    "README.md": b"card",
}


@pytest.fixture
def hub() -> Iterator[StubHub]:
    with stub_hub(dict(FILES)) as made:
        yield made


def fetch(
    tmp_path: Path,
    url: str,
    model: str = REPOSITORY,
    before: Callable[[], None] | None = None,
    **environment: str,
) -> "subprocess.CompletedProcess[str]":
    """`before` runs in the new process."""
    own = {
        "TOLLHOUSE_DATA_DIR": str(tmp_path / "data"),
        "HF_HOME": str(tmp_path / "hub"),
        "HF_ENDPOINT": url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **environment,
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOLLHOUSE_", "HF_"))}
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli.main", "model", "fetch", model, "--json"],
        cwd=ROOT,
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=200,
        preexec_fn=before,
    )


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line that says what is wrong, and the one that says what to do."""
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tollhouse: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_only_the_files_that_serving_needs_are_fetched(hub: StubHub, tmp_path: Path) -> None:
    done = fetch(tmp_path, hub.url)
    assert done.returncode == 0, done.stderr
    path = Path(json.loads(done.stdout)["path"])
    assert (path / "model.safetensors").read_bytes() == WEIGHTS
    assert sorted(hub.fetched) == sorted(list(FILES)[:5])


def test_what_is_fetched_serves_without_the_network(hub: StubHub, tmp_path: Path) -> None:
    first = fetch(tmp_path, hub.url)
    hub.fetched.clear()
    again = fetch(tmp_path, hub.url, HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout) and not hub.fetched


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised as hqq"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched(
    hub: StubHub, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    hub.files["config.json"] = json.dumps(CONFIG | changes).encode()
    said = refusal(fetch(tmp_path, hub.url))
    assert named in said
    assert "model.safetensors" not in hub.fetched
    if "architectures" in changes:
        assert "supported are" in said and "LlamaForCausalLM" in said


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (404, "RepoNotFound", "has no model repository someone/tiny"),
        (401, "", "private or gated"),
        (401, "GatedRepo", "gated"),
        (403, "GatedRepo", "gated"),
        (403, "", "gated or private"),
        (429, "", "429"),
        (503, "", "503"),
    ],
)
def test_each_refusal_of_the_hub_is_one_clear_line(
    hub: StubHub, tmp_path: Path, status: int, code: str, said: str
) -> None:
    hub.status, hub.error_code = status, code
    line = refusal(fetch(tmp_path, hub.url))
    assert said in line and REPOSITORY in line


def test_no_network_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert "the hub does not answer" in refusal(fetch(tmp_path, f"http://127.0.0.1:{port}"))


def test_offline_mode_is_named(tmp_path: Path, hub: StubHub) -> None:
    assert "HF_HUB_OFFLINE" in refusal(fetch(tmp_path, hub.url, HF_HUB_OFFLINE="1"))


def test_a_cut_download_leaves_no_weights_under_their_name(hub: StubHub, tmp_path: Path) -> None:
    hub.cut, hub.ranges = True, "ignored"
    refusal(fetch(tmp_path, hub.url))
    assert not list((tmp_path / "hub").rglob("snapshots/*/model.safetensors"))
    hub.cut, hub.ranges = False, "honoured"
    hub.asked.clear()
    assert fetch(tmp_path, hub.url).returncode == 0
    assert hub.asked == [f"bytes={len(WEIGHTS) // 2}-"], "the second run goes on with the rest"


def cached(tmp_path: Path) -> list[str]:
    """What the hub's cache holds of weights, whole or half."""
    found = [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]
    return [path.name for path in found if "safetensors" in path.name or path.stat().st_size > 5000]


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_does_not_match_its_checksum_is_discarded(
    hub: StubHub, tmp_path: Path, file: str
) -> None:
    hub.spoilt = file
    said = refusal(fetch(tmp_path, hub.url))
    assert file in said and REPOSITORY in said and "checksum" in said
    assert cached(tmp_path) == []
    if file == "model.safetensors":
        hub.spoilt = ""
        again = fetch(tmp_path, hub.url)
        assert again.returncode == 0, again.stderr
        path = Path(json.loads(again.stdout)["path"])
        assert (path / "model.safetensors").read_bytes() == WEIGHTS


def half_the_weights() -> None:
    """As a quota per file says it: no file may grow beyond half of the weights."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(WEIGHTS) // 2, len(WEIGHTS) // 2))


def test_a_file_that_may_not_grow_leaves_nothing_behind(hub: StubHub, tmp_path: Path) -> None:
    said = refusal(fetch(tmp_path, hub.url, before=half_the_weights))
    assert REPOSITORY in said and "File too large" in said
    assert cached(tmp_path) == [] and "model.safetensors" in hub.fetched
    assert fetch(tmp_path, hub.url).returncode == 0


_CAN_MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none"]


def may_mount(directory: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_CAN_MOUNT, str(directory)], capture_output=True).returncode == 0


def test_a_disk_that_fills_up_is_said_and_leaves_nothing_behind(
    hub: StubHub, tmp_path: Path
) -> None:
    """A real disk of 64 KiB, in a namespace of this process."""
    if not may_mount(tmp_path):
        pytest.skip("this machine allows no mounts in a user namespace")
    own = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    own |= {"HF_HOME": str(tmp_path), "TOLLHOUSE_DATA_DIR": str(tmp_path)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOLLHOUSE_", "HF_"))}
    script = (
        f"mount -t tmpfs -o size=64k none {tmp_path}\n"
        f"{sys.executable} -m gateway.cli.main model fetch {REPOSITORY} --json; code=$?\n"
        f"find {tmp_path} -name '*.incomplete' -o -name '*.part' -o -name 'model.safetensors'\n"
        "exit $code\n"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        cwd=ROOT,
        env=kept | own,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "No space left on device" in refusal(done)
    assert done.stdout == "", "what is half-written stays"


def test_a_repository_without_safetensors_is_refused(hub: StubHub, tmp_path: Path) -> None:
    del hub.files["model.safetensors"], hub.files["original/model.safetensors"]
    del hub.files["consolidated.safetensors"]
    assert "no safetensors weights" in refusal(fetch(tmp_path, hub.url))


@pytest.mark.parametrize("model", ["smolm2", "a/b/c", "no-such-dir/", "./nowhere", "x.gguf"])
def test_a_name_that_is_nothing_is_told_what_there_is(tmp_path: Path, model: str) -> None:
    done = fetch(tmp_path, "http://127.0.0.1:9", model)
    assert model in refusal(done) and "smollm2" in done.stderr
