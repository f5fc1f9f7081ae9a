"""A mixture of experts on a CPU beside `transformers`: 32 requests in one batch, tokens a second.

    python -m benchmarks.experts [--quick] [--rounds N] [--threads N]

The model is a random Mixtral in bfloat16, or float32 where the processor has no bfloat16 products: 8
experts, 2 of them for a token. `transformers` has all requests in one static batch of one length, which
spares it every wait. Both run in turns in one process, prompts included; a figure is that of the round
with the median ratio. Greedy tokens are compared in float32 first.
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
from engine.backends.layers.linear import multiplies_bfloat16
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner, physical_cores

_VOCAB = 8_192
_SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8}
_SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


def make_model(folder: Path, *, quick: bool) -> None:
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        **(_SMALL if quick else _SHAPE), vocab_size=_VOCAB, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.MixtralForCausalLM(config).save_pretrained(folder)


class Ours:
    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        self._config = EngineConfig(
            model=str(folder), dtype=dtype, threads=threads, num_blocks=1024, max_batch_tokens=512,
            prefix_cache=False, speculation="off",
        )  # fmt: skip
        self._runner = load_runner(self._config)

    def __call__(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        engine = Engine(self._config, self._runner)
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            engine.submit(GenerateRequest(str(number), "t", prompt, sampling), "g")
        said: list[list[int]] = [[] for _ in prompts]
        while engine.busy:
            engine.step()
            for outbox in engine.take_outboxes().values():
                for chunk in outbox.chunks:
                    said[int(chunk.request_id)] += chunk.tokens
        return said


class Theirs:
    def __init__(self, folder: Path, dtype: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = transformers.MixtralForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype)
            ).eval()

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count,
            min_new_tokens=count, eos_token_id=_VOCAB - 1,
        )  # fmt: skip
        said: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return said


def rate(side: Ours | Theirs, prompts: list[list[int]], count: int) -> float:
    begun = time.perf_counter()
    side(prompts, count)
    return len(prompts) * count / (time.perf_counter() - begun)


def agreement(folder: Path, prompts: list[list[int]], threads: int) -> float:
    """The share of equal greedy tokens in float32."""
    ours = Ours(folder, "float32", threads)(prompts, 8)
    theirs = Theirs(folder, "float32")(prompts, 8)
    pairs = [pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the script")
    parser.add_argument("--rounds", type=int, help="default 5, and 1 with --quick")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    chosen = parser.parse_args(arguments)
    rounds = chosen.rounds or (1 if chosen.quick else 5)
    threads = chosen.threads or physical_cores()
    draw, count = random.Random(5), 8 if chosen.quick else 64
    prompts = [[draw.randrange(3, _VOCAB - 1) for _ in range(64)] for _ in range(32)]
    dtype = "bfloat16" if multiplies_bfloat16() else "float32"
    rates: tuple[list[float | None], list[float | None]] = [], []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder, quick=chosen.quick)
        equal = agreement(folder, prompts[:4], threads)
        sides: list[Ours | Theirs] = [Ours(folder, dtype, threads), Theirs(folder, dtype)]
        torch.set_num_threads(threads)
        before = processor_times()
        for number in range(rounds + 1):
            for found, side in zip(rates, sides, strict=True):
                value = rate(side, prompts, count)
                progress(f"{type(side).__name__}: {value:.1f} tok/s")
                if number:  # the first round is a warm-up
                    found.append(value)
    pair = median_pair(*rates)
    settings: dict[str, Any] = {
        "dtype": dtype, "threads": threads, "rounds": rounds, "quick": chosen.quick,
        "equal_tokens": equal, "stolen_percent": stolen_since(before),
    }  # fmt: skip
    if pair is not None:
        figure(
            "experts: 8 experts, 2 active, 32 requests", pair[0], "tok/s", True, "transformers",
            pair[1], at_least=3.0, aim=6.0, settings=settings,
        )  # fmt: skip
    return 0 if equal == 1.0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
