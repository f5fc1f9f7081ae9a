"""Whether our engine answers as llama.cpp does on the same GGUF file: ids, then greedy tokens."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.cpu.environments import PEERS, SCRIPTS, ready
from benchmarks.report import progress
from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.gguf import describe
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner

_TIMEOUT_S = 3600
# Logits of two float32 implementations differ by the order of their sums.
_FLOAT32_GAP = 0.02
_QUESTIONS = (
    "What is the capital of France?", "Explain gravity in simple words.", "Write a haiku about rain.",
    "What is 12 + 30?", "List three fruits.", "Who wrote Hamlet?", "How do I boil an egg?",
    "Translate 'good morning' to French.", "What is a database?", "Tell me a joke.",
    "Why is the sky blue?", "Name the planets.", "What is HTTP?", "Define entropy.",
    "How many days are in 3 weeks?", "What is Python used for?", "Describe a whale.",
    "Give me advice for a job interview.", "What does a bank do?", "Summarise the story of Icarus.",
)  # fmt: skip
_TEXTS = (
    "x 1  22   333 4444", "in 2024, 3.14159 and 1,000,000", "tabs\t\tand\n\nlines\r\n end",
    "don't WON'T I'll", "naïve café МОСКВА 日本語 中文 12", "🙂 ½ Ⅷ ²³ ١٢٣", "a<|im_end|> 7", "   ",
)  # fmt: skip


def check(model: Path, home: Path, threads: int, tokens: int = 64) -> bool:
    """Reports every difference on stderr. False where one is more than rounding."""
    described = describe(model)
    encode = described.tokenizer.encode
    prompts = [
        encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n").ids
        for text in _QUESTIONS
    ]
    work: dict[str, Any] = {
        "model": str(model),
        "threads": threads,
        "texts": [*_TEXTS, *_random_texts(200)],
        "prompts": prompts,
        "answers": {
            "file": _greedy(model, prompts, threads, tokens, "auto"),
            "float32": _greedy(model, prompts, threads, tokens, "none"),
        },
    }
    found = _llama_cpp(work, home)
    same = _compare_ids(work["texts"], [encode(text).ids for text in work["texts"]], found["ids"])
    return _compare_tokens(work["answers"], found) and same


def _random_texts(count: int) -> list[str]:
    draw = random.Random(3)
    letters = list("ab cD 12 3\n\t.,!'s é日🙂-_/\\()\r  ")
    return ["".join(draw.choices(letters, k=draw.randrange(1, 60))) for _ in range(count)]


def _greedy(
    model: Path, prompts: list[list[int]], threads: int, tokens: int, quantization: str
) -> list[list[int]]:
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        quantization=quantization,
        threads=threads,
        kv_memory_bytes=1 << 30,
    )
    engine = Engine(config, load_runner(config))
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.submit(GenerateRequest(str(number), "check", prompt, sampling, None), "check")
    answers: list[list[int]] = [[] for _ in prompts]
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                answers[int(chunk.request_id)] += chunk.tokens
    return answers


def _llama_cpp(work: dict[str, Any], home: Path) -> dict[str, Any]:
    python = ready(PEERS["llama-cpp-python"])
    if python is None:
        raise SystemExit("llama.cpp could not be installed")
    asked, answers = home / "check.json", home / "check-answers.json"
    asked.write_text(json.dumps(work), encoding="utf-8")
    script = str(SCRIPTS / "run_llama_cpp_file.py")
    command = [str(python), script, str(asked), str(answers), str(home / "check-f32.gguf")]
    environment = os.environ | {"PYTHONPATH": str(SCRIPTS)}
    subprocess.run(
        command, check=True, timeout=_TIMEOUT_S, env=environment, stderr=subprocess.DEVNULL
    )
    found: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
    return found


def _compare_ids(texts: list[str], ours: list[list[int]], theirs: list[list[int]]) -> bool:
    other = [n for n, (own, their) in enumerate(zip(ours, theirs, strict=True)) if own != their]
    for n in other:
        progress(f"ids of {texts[n]!r}: ours {ours[n]}, llama.cpp {theirs[n]}")
    progress(f"ids: {len(texts) - len(other)} of {len(texts)} texts are the same")
    return not other


def _compare_tokens(answers: dict[str, Any], found: dict[str, Any]) -> bool:
    """On the file, a token may differ by what llama.cpp's own eight-bit activations move a logit."""
    rounding = max(
        abs(here[2] - wide[2])
        for one, other in zip(found["file"], found["file_float32"], strict=True)
        for here, wide in zip(one, other, strict=True)
    )
    results = [
        _compare(kind, answers[kind], found[kind], most)
        for kind, most in (("file", 2 * rounding), ("float32", _FLOAT32_GAP))
    ]
    return all(results)


def _compare(kind: str, answers: list[list[int]], steps: list[list[Any]], most: float) -> bool:
    """Whether no token of ours has a logit that is lower than llama.cpp's best by more than `most`."""
    compared, same, widest = 0, 0, 0.0
    for number, (answer, forced) in enumerate(zip(answers, steps, strict=True)):
        for place, (ours, (best, logit, own)) in enumerate(zip(answer, forced, strict=True)):
            compared += 1
            same += ours == best
            if ours != best:
                widest = max(widest, logit - own)
                progress(
                    f"{kind}: prompt {number}, token {place}: ours {ours} has {own:.4f}, llama.cpp's "
                    f"{best} has {logit:.4f}: apart by {logit - own:.4f} (rounding: {most:.4f})"
                )
    progress(f"{kind}: {same} of {compared} greedy tokens are the same")
    return widest <= most
