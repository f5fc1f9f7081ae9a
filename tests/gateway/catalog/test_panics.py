"""A tokenizer that panics is refused at load; a text at which it panics, with an answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import BadRequest, SettingError
from engine.demo.paths import MODEL_DIR
from gateway.catalog.codec.tokenizing import load_codec

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(pattern: str) -> dict[str, Any]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, _BYTES]}}


def _normalizer(**fields: Any) -> dict[str, Any]:
    return {"normalizer": fields}


def saved(directory: Path, changes: dict[str, Any]) -> Path:
    content = json.loads((MODEL_DIR / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(content | changes))
    return directory


@pytest.mark.parametrize(
    "changes",
    [
        _split("(a+)+$"),
        _normalizer(type="Replace", pattern={"String": ""}, content="b"),
        _normalizer(type="Precompiled", precompiled_charsmap="AAAA"),
        _normalizer(type="Precompiled", precompiled_charsmap="/////wAAAAA="),
    ],
)
def test_a_tokenizer_that_panics_is_refused_or_works(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    try:
        codec = load_codec(saved(tmp_path, changes))
    except SettingError as error:
        assert "tokenizer.json" in error.message
    else:
        assert codec.encode("plain")


def test_a_text_at_which_a_tokenizer_panics_is_refused(tmp_path: Path) -> None:
    codec = load_codec(saved(tmp_path, _split("(b+)+$")))
    with pytest.raises(BadRequest) as caught:
        codec.encode("b" * 2000 + "!")
    assert caught.value.code == "text_not_encodable"
