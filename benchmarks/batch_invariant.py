"""What `batch_invariant` costs on a CPU: tokens a second with it and without, in turns of one process.

    python -m benchmarks.batch_invariant [--model DIR] [--dtype D] [--rounds N] [--threads N] [--quick]

Without `--model`: a random Llama of 135 million parameters in SmolLM2's shape. 32 requests and one, of 64
prompt tokens, and one prompt of 1,000; a figure is that of the round with the median ratio.
"""

import argparse
import random
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.report import figure, median_pair, processor_times, progress, stolen_since
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner, physical_cores

_SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
          "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152}  # fmt: skip
_SMALL = _SHAPE | {"num_hidden_layers": 2, "vocab_size": 1024}
# Requests, prompt tokens and output tokens of each; of the prompt alone, its tokens are counted.
_WORK = {"32 requests": (32, 64, 48), "one request": (1, 64, 64), "a prompt": (1, 1000, 1)}


def make_model(folder: Path, *, quick: bool) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **(_SMALL if quick else _SHAPE), tie_word_embeddings=True, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


class Side:
    def __init__(self, model: str, dtype: str, threads: int, *, batch_invariant: bool) -> None:
        self._config = EngineConfig(
            model=model, dtype=dtype, threads=threads, num_blocks=1024, max_batch_tokens=512,
            prefix_cache=False, speculation="off", batch_invariant=batch_invariant,
        )  # fmt: skip
        self._runner = load_runner(self._config)

    def __call__(self, prompts: list[list[int]], count: int) -> float:
        """Tokens a second."""
        engine = Engine(self._config, self._runner)
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.submit(GenerateRequest(str(number), "t", prompt, sampling), "g")
        begun = time.perf_counter()
        while engine.busy:
            engine.step()
            engine.take_outboxes()
        tokens = count if count > 1 else len(prompts[0])
        return len(prompts) * tokens / (time.perf_counter() - begun)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.batch_invariant", description=__doc__
    )
    parser.add_argument("--model", help="a directory in Hugging Face layout")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, help="default 5, and 1 with --quick")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the script")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    threads = chosen.threads or physical_cores()
    with tempfile.TemporaryDirectory() as place:
        if chosen.model is None:
            make_model(Path(place), quick=chosen.quick)
        model = chosen.model or place
        sides = [Side(model, chosen.dtype, threads, batch_invariant=on) for on in (True, False)]
        torch.set_num_threads(threads)
        for name, work in _WORK.items():
            _compare(name, work, sides, rounds, {"dtype": chosen.dtype, "threads": threads})
    return 0


def _compare(
    name: str, work: tuple[int, int, int], sides: list[Side], rounds: int, settings: dict[str, Any]
) -> None:
    (requests, length, count), draw = work, random.Random(5)
    rates: tuple[list[float | None], list[float | None]] = [], []
    before = processor_times()
    for number in range(rounds + 1):
        prompts = [[draw.randrange(3, 1000) for _ in range(length)] for _ in range(requests)]
        found = [side(prompts, count) for side in sides]
        progress(f"{name}: {found[0]:.1f} tok/s, {found[1]:.1f} without")
        if number:  # the first round is a warm-up
            for listed, rate in zip(rates, found, strict=True):
                listed.append(rate)
    pair = median_pair(*rates)
    if pair is not None:
        settings |= {"rounds": rounds, "stolen_percent": stolen_since(before)}
        figure(
            f"batch_invariant: {name}", pair[0], "tok/s", True, "without it", pair[1],
            settings=settings,
        )  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
