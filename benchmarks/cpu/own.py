"""Runs the work on our engine, in a process of its own.

python -m benchmarks.cpu.own WORK.json             beside peers: asked for a rate at a time
python -m benchmarks.cpu.own WORK.json SCENARIO    beside itself: prints the values of each round
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.cpu.work import Work, registered_directories
from benchmarks.peers.protocol import answer
from benchmarks.report import progress
from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner

Rounds = dict[str, list[float]]  # by what was measured, a value a round

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
            **({"quantization": "int8" if work.int8 else "auto"} | settings),
        )
        self.engine = Engine(config, load_runner(config), submit=_LOADER.submit)
        self._asked = 0

    def rate(
        self,
        prompts: list[list[int]],
        adapters: Sequence[str | None] | None = None,
        output: int | None = None,
    ) -> float:
        """Output tokens a second for all prompts at once, adapters in turn."""
        each = output or self.work.output
        start = time.perf_counter()
        for n, prompt in enumerate(prompts):
            self._submit(prompt, each, adapters[n % len(adapters)] if adapters else None)
        made = self._drain()
        spent = time.perf_counter() - start
        assert made == len(prompts) * each, f"{made} tokens came, not {len(prompts) * each}"
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


def beside_peers(work: Work) -> dict[str, Callable[[], float]]:
    bench = Bench(work)
    digests = [bench.engine.load_adapter(path).digest for path in work.adapters]
    prompts = work.prompts
    bench.rate(prompts[:2], output=2)
    # Loading is not what is measured here.
    bench.rate(fresh(prompts, 1)[: len(digests)], digests, output=1)
    salt = count(100)
    plain = {
        "base": lambda: bench.rate(fresh(prompts, next(salt))),
        "one": lambda: bench.rate(fresh(prompts[:1], next(salt))),
    }
    if not digests:
        return plain
    return plain | {
        "lora4": lambda: bench.rate(fresh(prompts, next(salt)), digests[:4]),
        "lora32": lambda: bench.rate(fresh(prompts, next(salt)), digests[:32]),
    }


def zipf(work: Work) -> Rounds:
    """The same requests over 4 adapters, and drawn by Zipf's law from a thousand registered."""
    bench = Bench(work)
    directories = registered_directories(work, _REGISTERED)
    digests = [bench.engine.load_adapter(str(path)).digest for path in directories]
    weights = [1 / rank for rank in range(1, len(digests) + 1)]
    draw = random.Random(5)
    asked = work.prompts * 2

    def four(salt: int) -> float:
        return bench.rate(fresh(asked, salt), digests[:4])

    def drawn(salt: int) -> float:
        return bench.rate(fresh(asked, salt), draw.choices(digests, weights, k=len(asked)))

    return alternated({"four": four, "zipf": drawn}, work.repeats)


def switches(work: Work) -> Rounds:
    """Base-only work with LoRA on and off, and with the prefix cache on and off at no hits."""
    made = {
        "no_lora": Bench(work, enable_lora=False),
        "plain": Bench(work),
        "no_prefix": Bench(work, prefix_cache=False),
    }
    digest = made["plain"].engine.load_adapter(work.adapters[0]).digest
    made["plain"].rate(work.prompts[:1], [digest], output=2)

    def on(bench: Bench) -> Callable[[int], float]:
        return lambda salt: bench.rate(fresh(work.prompts, salt))

    return alternated({name: on(bench) for name, bench in made.items()}, work.repeats + 2)


def cached_prompt(work: Work) -> Rounds:
    """Seconds to the first token of a prompt that nobody has sent, and of the same one again."""
    bench = Bench(work)
    length = 1000 if len(work.prompts[0]) >= 128 else 100
    bench.first_token([3] * 8)

    def first(salt: int) -> float:
        return bench.first_token(fresh([[1000] * length], salt)[0])

    return alternated({"cold": first, "cached": first}, work.repeats + 2, turned=False)


def alternated(
    measured: dict[str, Callable[[int], float]], rounds: int, *, turned: bool = True
) -> Rounds:
    """Each in turn, given the round's number as salt, so that neighbours in time can be compared;
    every other round backwards, unless not `turned`. A first round warms and is not told."""
    found: Rounds = {name: [] for name in measured}
    for number in range(rounds + 1):
        order = list(measured) if number % 2 == 0 or not turned else list(reversed(measured))
        values = {name: measured[name](number) for name in order}
        progress(f"  ours, round {number}: {', '.join(f'{n} {v:.4g}' for n, v in values.items())}")
        for name, value in values.items() if number else ():
            found[name].append(value)
    return found


SCENARIOS = {
    "zipf": zipf,
    "switches": switches,
    "cached_prompt": cached_prompt,
}


def main(arguments: list[str]) -> int:
    work = Work(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    if len(arguments) == 1:
        answer(beside_peers(work))
    else:
        sys.stdout.write(json.dumps(SCENARIOS[arguments[1]](work)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
