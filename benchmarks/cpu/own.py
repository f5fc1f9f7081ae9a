"""Runs the work on our engine, in a process of its own, and prints what it measured as JSON.

python -m benchmarks.cpu.own WORK.json SCENARIO...
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.cpu.work import Work, registered_directories
from benchmarks.report import progress
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runner import load_runner

_REGISTERED = 1000
_LOADER = ThreadPoolExecutor(1)


class Bench:
    """An engine with the work's model; every request has a name of its own."""

    def __init__(self, work: Work, **settings: Any) -> None:
        self.work = work
        config = EngineConfig(
            model=work.checkpoint,
            threads=work.threads,
            kv_memory_bytes=3 << 30,
            **settings,
        )
        self.engine = Engine(config, load_runner(config), submit=_LOADER.submit)
        self._asked = 0

    def rate(
        self, prompts: list[list[int]], adapters: list[str] | None = None, output: int | None = None
    ) -> float:
        """Output tokens a second for all prompts at once, adapters in turn."""
        count = output or self.work.output
        start = time.perf_counter()
        for n, prompt in enumerate(prompts):
            self._submit(prompt, count, adapters[n % len(adapters)] if adapters else None)
        made = self._drain()
        spent = time.perf_counter() - start
        assert made == len(prompts) * count, f"{made} tokens came, not {len(prompts) * count}"
        return made / spent

    def first_token(self, prompt: list[int]) -> float:
        """Seconds to the first token of one request alone."""
        start = time.perf_counter()
        self._submit(prompt, 1, None)
        self._drain()
        return time.perf_counter() - start

    def _submit(self, prompt: list[int], output: int, adapter: str | None) -> None:
        self._asked += 1
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        ask = GenerateRequest(str(self._asked), "bench", prompt, sampling, adapter)
        self.engine.submit(ask, "bench")

    def _drain(self) -> int:
        made = 0
        while self.engine.busy:
            if not self.engine.step():
                time.sleep(0.0002)
            for outbox in self.engine.take_outboxes().values():
                made += sum(len(chunk.tokens) for chunk in outbox.chunks)
        return made


def fresh(prompts: list[list[int]], salt: int) -> list[list[int]]:
    """The same lengths with other ids, so that nothing is found in the prefix cache."""
    ids = random.Random(salt)
    top = max(max(prompt) for prompt in prompts)
    return [[ids.randrange(3, top) for _ in prompt] for prompt in prompts]


def median(measure: Callable[[int], float], repeats: int) -> float:
    return statistics.median(measure(n) for n in range(repeats))


def throughput(work: Work) -> dict[str, float]:
    bench = Bench(work)
    digests = [bench.engine.load_adapter(path).digest for path in work.adapters]
    prompts = work.prompts
    bench.rate(prompts[:2], output=2)
    found = {}
    for name, asked, adapters in (
        ("base", prompts, None),
        ("one", prompts[:1], None),
        ("lora4", prompts, digests[:4]),
        ("lora32", prompts, digests[:32]),
    ):
        if adapters is not None:  # loading is not what is measured here
            bench.rate(fresh(prompts, 1)[: len(adapters)], adapters, output=1)
        rates = [bench.rate(fresh(asked, 100 + n), adapters) for n in range(work.repeats)]
        found[name] = statistics.median(rates)
        progress(f"  ours, {name}: {found[name]:.1f} tok/s of {[round(r, 1) for r in rates]}")
    return found


def zipf(work: Work) -> dict[str, float]:
    """The same requests over 4 adapters, and drawn by Zipf's law from a thousand registered."""
    bench = Bench(work)
    directories = registered_directories(work, _REGISTERED)
    digests = [bench.engine.load_adapter(str(path)).digest for path in directories]
    weights = [1 / rank for rank in range(1, len(digests) + 1)]
    draw = random.Random(5)
    found: dict[str, list[float]] = {"four": [], "zipf": []}
    for n in range(max(2, work.repeats)):
        prompts = fresh(work.prompts * 2, n)
        drawn = draw.choices(digests, weights, k=len(prompts))
        four, many = bench.rate(prompts, digests[:4]), bench.rate(fresh(prompts, 50 + n), drawn)
        progress(
            f"  ours, {len(set(drawn))} of {len(digests)} adapters: {many:.1f}, four: {four:.1f}"
        )
        if n:  # the first round warms
            found["four"].append(four)
            found["zipf"].append(many)
    return {name: statistics.median(rates) for name, rates in found.items()}


def switches(work: Work) -> dict[str, float]:
    """Base-only work with LoRA on and off, and with the prefix cache on and off at no hits.

    The best of alternating rounds: what disturbs a run only ever slows it.
    """
    made = {
        "plain": Bench(work),
        "no_lora": Bench(work, enable_lora=False),
        "no_prefix": Bench(work, prefix_cache=False),
    }
    digest = made["plain"].engine.load_adapter(work.adapters[0]).digest
    made["plain"].rate(work.prompts[:1], [digest], output=2)
    found: dict[str, list[float]] = {name: [] for name in made}
    for n in range(work.repeats + 2):
        order = list(made) if n % 2 else list(reversed(made))
        for name in order:
            rate = made[name].rate(fresh(work.prompts, 10 * n))
            if n:
                found[name].append(rate)
        progress(f"  ours, switches, round {n}")
    return {name: max(rates) for name, rates in found.items()}


def cached_prompt(work: Work) -> dict[str, float]:
    bench = Bench(work)
    length = 1000 if len(work.prompts[0]) >= 128 else 100
    ids = random.Random(3)
    bench.first_token([3] * 8)
    cold, warm = [], []
    for _ in range(work.repeats + 2):
        prompt = [ids.randrange(3, 1000) for _ in range(length)]
        cold.append(bench.first_token(prompt))
        warm.append(bench.first_token(prompt))
    progress(f"  ours, {length} tokens cold {min(cold):.3f} s, cached {min(warm):.4f} s")
    return {"cold": statistics.median(cold), "cached": statistics.median(warm)}


SCENARIOS = {
    "throughput": throughput,
    "zipf": zipf,
    "switches": switches,
    "cached_prompt": cached_prompt,
}


def main(arguments: list[str]) -> int:
    work = Work(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    found = {name: SCENARIOS[name](work) for name in arguments[1:]}
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
