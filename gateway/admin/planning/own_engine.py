"""`tollhouse plan --engine`: a running engine's own step times, and its scheduler in simulated time."""

import urllib.request
from dataclasses import replace
from typing import Any
from urllib.error import URLError

from core.errors import BadRequest, Unavailable
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.planning.own_steps import OwnSteps, read
from engine.planning.simulation import Load, Measured, Simulation, measured
from engine.planning.workload import Workload

_TIMEOUT_S = 10.0
_MOST_BYTES = 16 << 20
_REQUESTS = 300
_GOOD = 0.9  # of the requests within both objectives: below it goodput falls
_HALVINGS = 7
_BLOCKS = 4096  # where the page does not say
_AT_ONCE = 64  # sequences of a step, as an engine takes by default


def own_steps(url: str) -> OwnSteps:
    """Of the engine whose metrics are at this address."""
    if not url.startswith(("http://", "https://")):
        raise BadRequest(
            f"--engine is {url!r}.",
            next_step="Give the address of the engine's metrics, such as http://127.0.0.1:9400/metrics.",
        )
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:
            text = answer.read(_MOST_BYTES).decode(errors="replace")
    except (URLError, OSError, ValueError) as error:
        raise Unavailable(
            f"No metrics come from {url}: {error}.",
            next_step="Start the engine with --metrics-port, and give the address of its /metrics.",
        ) from None
    try:
        return read(text)
    except EngineError as error:
        raise BadRequest(error.message) from None


def simulated(own: OwnSteps, work: Workload, seed: int = 1) -> dict[str, Any]:
    """The workload on one such engine, and the highest rate at which 90 % of requests meet the
    objectives."""
    found = _played(own, work, seed)
    knee = _knee(own, work, seed)
    fixed, row, position, token, pair = own.factors
    return {
        "steps_measured": own.steps,
        "fit_error": round(own.error, 4),
        "step_s": {
            "fixed": fixed, "row": row, "position": position, "prompt_token": token,
            "prompt_token_and_position": pair,
        },
        "blocks": own.blocks or _BLOCKS,
        "rate": work.rate,
        "requests": found.requests,
        "seed": seed,
        "ttft_ms": _ms(found.ttft_mean),
        "ttft_p95_ms": _ms(found.ttft_p95),
        "tpot_ms": _ms(found.tpot_mean),
        "tpot_p95_ms": _ms(found.tpot_p95),
        "output_tokens_per_s": round(found.output_rate, 2),
        "goodput": round(found.goodput, 4),
        "knee_rate": None if knee is None else round(knee, 3),
    }  # fmt: skip


def _played(own: OwnSteps, work: Workload, seed: int) -> Measured:
    prompt, output, shared = (round(each) for each in (work.prompt, work.output, work.shared))
    config = EngineConfig(
        model="planned", num_blocks=own.blocks or _BLOCKS, max_running=_AT_ONCE, speculation="off",
        prefix_cache=shared > 0, enable_lora=False, max_waiting=10**9, max_waiting_per_tenant=10**9,
        receipts_kept=10**9, max_context=2 * (prompt + output) + 2, max_batch_tokens=512,
    )  # fmt: skip
    simulation = Simulation(config, own.seconds())
    load = Load(
        rate=work.rate, requests=_REQUESTS, prompt=prompt, output=output, shared=shared, seed=seed
    )
    try:
        receipts = simulation.run(load)
    except EngineError as error:
        raise BadRequest(
            error.message, next_step="Plan shorter prompts, or a larger pool."
        ) from None
    return measured(receipts, simulation.clock.now, work.ttft, work.tpot)


def _knee(own: OwnSteps, work: Workload, seed: int) -> float | None:
    """None without objectives, or if not even a request alone meets them."""
    if not work.ttft and not work.tpot:
        return None

    def _holds(rate: float) -> bool:
        found = _played(own, replace(work, rate=rate), seed)
        return found.goodput * found.seconds >= _GOOD * found.requests

    low, high = 0.0, work.rate
    while _holds(high) and high < 1e4:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _holds(middle) else (low, middle)
    return low or None


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
