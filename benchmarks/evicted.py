"""What is lost where keys and values are dropped: perplexity of what follows a long text, and needles.

Each kind of eviction computes the same texts of SmolLM2, the first part as a prompt and the rest as an
answer that is given token by token. Kinds of one size hold equally many positions while they answer.
"""

import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.quantization import page_parts
from benchmarks.report import figure, progress
from engine.batch import Row
from engine.config import EngineConfig
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import CpuRunner, load_runner
from engine.scheduling.eviction import OBSERVED, eviction_of
from engine.scheduling.sequence import Request

_BLOCK, _PROMPT, _ANSWER = 16, 1024, 256
_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
KINDS: dict[str, dict[str, int]] = {
    "all": {},
    "first 4, last 256": {"kv_window": 256},
    "first 4, last 512": {"kv_window": 512},
    "first 4, heavy 256, last 256": {"kv_window": 256, "kv_heavy": 256},
}


def measure_evicted(path: Path, tokenizer: Tokenizer, *, quick: bool) -> None:
    parts = page_parts(tokenizer, 12)
    text = [each for part in parts for each in part]
    size = _PROMPT + _ANSWER
    texts = [text[n * size :][:size] for n in range(1 if quick else min(4, len(text) // size))]
    needles = [
        haystack(tokenizer, text, _PROMPT, depth, str(random.Random(n).randrange(10000, 99999)))
        for n, depth in enumerate(_DEPTHS[:1] if quick else _DEPTHS)
    ]
    perplexity: dict[str, float] = {}
    found: dict[str, int] = {}
    for name, settings in KINDS.items():
        config = EngineConfig(model=str(path), dtype="float32", num_blocks=100, **settings)  # type: ignore[arg-type]
        runner = load_runner(config)
        assert isinstance(runner, CpuRunner)
        losses = [_loss(runner, config, each) for each in texts]
        perplexity[name] = math.exp(sum(losses) / len(losses))
        found[name] = sum(_is_found(runner, config, *each) for each in needles)
        progress(f"{name}: perplexity {perplexity[name]:.3f}, needles {found[name]}")
    own = {"prompt": _PROMPT, "answer": _ANSWER, "texts": len(texts)}
    for name in list(KINDS)[1:]:
        growth = 100 * (perplexity[name] / perplexity["all"] - 1)
        figure(f"kv cache: perplexity growth, {name}", growth, "%", False,
               settings=own | {"perplexity of all": perplexity["all"]})  # fmt: skip
        figure(f"kv cache: needles found, {name}", found[name], f"of {len(needles)}", True,
               "own, all", found["all"], settings={"prompt": _PROMPT})  # fmt: skip


def _loss(runner: CpuRunner, config: EngineConfig, ids: list[int]) -> float:
    """Mean loss of the answer's tokens but the first, which a query of the prompt gives."""
    logits = answer_logits(runner, config, ids, _PROMPT)[:-1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[_PROMPT + 1 :])))


def _is_found(runner: CpuRunner, config: EngineConfig, ids: list[int], answer: list[int]) -> bool:
    """Whether each digit is the likeliest token; the first is a query's of the prompt's, left out."""
    logits = answer_logits(runner, config, ids + answer, len(ids))[:-1]
    return bool(logits.argmax(-1).tolist() == answer[1:])


@torch.inference_mode()
def answer_logits(
    runner: CpuRunner, config: EngineConfig, ids: list[int], prompt: int
) -> torch.Tensor:
    """Of the positions from `prompt` on, [tokens, vocab]."""
    sampling = SamplingParams(max_tokens=1)
    eviction = eviction_of(config)
    request = Request(GenerateRequest("bench", "bench", ids[:prompt], sampling), "", 0.0, len(ids))
    blocks = list(range(-(-len(ids) // _BLOCK)))
    logits = torch.zeros(0)
    sight = None
    for start, tokens in ((0, ids[:prompt]), (prompt, ids[prompt:])):
        if start and eviction is not None:
            eviction.choose(request, runner._plan.sums.pop(0).tolist())
            sight = eviction.answer_of(request)
        row = Row(
            0, tokens, start, blocks, None, True, sampling, 0, ids, prompt, answer=sight,
            observed=prompt - OBSERVED if eviction is not None and not start else None,
        )  # fmt: skip
        plan = runner._plan([], [row], tokens, all_logits=bool(start))
        logits = runner._forward(plan)[0]
    return logits


def haystack(
    tokenizer: Tokenizer, text: list[int], length: int, depth: float, number: str
) -> tuple[list[int], list[int]]:
    """The prompt, and the tokens of the answer."""

    def ids(words: str) -> list[int]:
        return list(tokenizer.encode(words, add_special_tokens=False).ids)

    before = int(depth * length)
    needle = ids(f"\n\nThe secret number of the archive is {number}. Remember it.\n\n")
    question = ids("\n\nQuestion: what is the secret number of the archive?\nAnswer: The secret "
                   "number of the archive is")  # fmt: skip
    hay = (text * 2)[: length - len(needle) - len(question)]
    return [*hay[:before], *needle, *hay[before:], *question], ids(f" {number}")
