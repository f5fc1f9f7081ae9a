"""`tollhouse serve` with a draft model: a local engine loads it, and answers are the same with it.

How often it is asked depends on measured times; `tests/engine` decides that by given costs.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.demo.paths import MODEL_DIR
from tests.engine.checkpoints import VOCAB, save_checkpoint
from tests.journeys.deployments import Command, serve

PROTECTS = ("engine/speculation", "engine/runners/cpu", "gateway/engines/local.py")
_TOKENS = 160


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first layer with its own head: cheap, and right now and then."""
    path = Path(shutil.copytree(MODEL_DIR, tmp_path_factory.mktemp("draft") / "first-layer"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = load_file(path / "model.safetensors")
    kept = {n: w for n, w in weights.items() if ".layers." not in n or ".layers.0." in n}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def served(folder: Path, **settings: str) -> tuple[str, dict[str, Any]]:
    """The text of one greedy answer, and its receipt in the engine's own file."""
    folder.mkdir()
    running = serve(Command(folder, {"TOLLHOUSE_DTYPE": "float32", **settings}))
    try:
        body = {
            "model": "tollhouse-demo", "temperature": 0, "max_tokens": _TOKENS, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Tell me about the toll."}],
        }  # fmt: skip
        answer = httpx.post(
            f"{running.url}/v1/chat/completions", headers=running.headers, json=body, timeout=120
        )
        answer.raise_for_status()
        assert answer.json()["usage"]["completion_tokens"] == _TOKENS
    finally:
        assert running.stop() == 0
    lines = (folder / "receipts" / "engine-0.log").read_text().splitlines()
    receipts = [each["receipt"] for each in map(json.loads, lines) if "receipt" in each]
    mine = [each for each in receipts if each["generated"] == _TOKENS]
    assert len(mine) == 1
    return answer.json()["choices"][0]["message"]["content"], mine[0]


@pytest.mark.proof
def test_an_answer_with_a_draft_model_is_the_same_and_costs_no_more_tokens(
    draft: Path, tmp_path: Path
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    assert model.config.num_hidden_layers == 1
    plain, without = served(tmp_path / "plain")
    text, receipt = served(tmp_path / "drafting", TOLLHOUSE_DRAFT_MODEL=str(draft))
    assert text == plain and receipt["generated"] == without["generated"] == _TOKENS
    assert receipt["prompt"] == without["prompt"]


@pytest.mark.proof
def test_another_vocabulary_stops_the_start_by_name(tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other")
    shutil.copy(MODEL_DIR / "tokenizer.json", other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"] |= {"vocab": {f"t{n}": n for n in range(VOCAB)}, "merges": []}
    content["added_tokens"] = []
    (other / "tokenizer.json").write_text(json.dumps(content))
    data = tmp_path / "data"
    data.mkdir()
    done = Command(data).run("serve", "--draft-model", str(other))
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "has another vocabulary than the model" in said
    assert "Check TOLLHOUSE_MODEL and TOLLHOUSE_DRAFT_MODEL" in said


@pytest.mark.proof
def test_the_shipped_heads_guess_and_the_answer_is_the_same(tmp_path: Path) -> None:
    plain, without = served(tmp_path / "plain", TOLLHOUSE_DRAFT_HEADS="none")
    text, receipt = served(tmp_path / "heads")
    assert text == plain
    for field in ("prompt", "generated", "delivered"):
        assert receipt[field] == without[field]


@pytest.mark.proof
def test_heads_of_another_model_stop_the_start_by_name(tmp_path: Path) -> None:
    folder, data = tmp_path / "heads", tmp_path / "data"
    folder.mkdir()
    data.mkdir()
    tensors = load_file(MODEL_DIR / "draft_heads.safetensors")
    tensors["merge.weight"] = tensors["merge.weight"][:, :128].contiguous()
    save_file(tensors, folder / "draft_heads.safetensors", {"format": "tollhouse-draft-heads-1"})
    done = Command(data).run("serve", "--draft-heads", str(folder))
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "tensor merge.weight has shape [256, 128], the model asks for [256, 512]" in said
    assert "Check TOLLHOUSE_MODEL and TOLLHOUSE_DRAFT_HEADS" in said
