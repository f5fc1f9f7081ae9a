"""Our engine on the real model, in a process of its own: `python -m benchmarks.cpu.real WORK.json`."""

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

from benchmarks.cpu.own import Bench, fresh
from benchmarks.cpu.work import Work
from benchmarks.peers.protocol import answer


def scenarios(work: Work) -> dict[str, Callable[[], float]]:
    # The prompts are drawn tokens, whose answers repeat themselves: guesses would come true too often.
    bench = Bench(work, speculation="off")
    digests = [bench.engine.load_adapter(path).digest for path in work.adapters]
    mixed: list[str | None] = [None, *digests]
    prompts, salt = work.prompts, count(100)
    bench.rate(fresh(prompts, 1)[: len(mixed)], mixed, output=2)
    return {
        "base": lambda: bench.rate(fresh(prompts, next(salt))),
        "one": lambda: bench.rate(fresh(prompts[:1], next(salt))),
        "mixed": lambda: bench.rate(fresh(prompts, next(salt)), mixed),
    }


def main(arguments: list[str]) -> int:
    work = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    work["checkpoint"] = work.pop("model")
    answer(scenarios(Work(**work)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
