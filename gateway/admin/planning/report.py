"""A plan as it is shown: numbers with their units in the names, the formulas and the sources."""

import math
from collections.abc import Sequence
from typing import Any

from engine.planning.capacity import Replica, State
from engine.planning.plan import Answer, Question
from engine.planning.step_times import facts_of_fit
from gateway.admin.planning.own_prices import SoldAt

_MOST_OTHERS = 4
FORMULAS = (
    ("KV of a token", "Σ layers 2 · kv_heads · head_dim · bytes; with latent attention one vector"),
    ("KV of a request", "KV of a token · (prompt + output); a layer counts at most its window"),
    ("decode step", "max(weights + experts + cache, products) + layers + sync + link + rows"),
    ("experts read", "E · (1 − (1 − k/E)^rows) of each layer"),
    ("prompt", "2 · active parameters · tokens / (devices · peak) + attention scores + link"),
    ("output token", "step / tokens a step / (1 − ρ), ρ = rate · prompt time"),
    ("tokens a step", "(1 − a^(g+1)) / (1 − a) with g guesses of acceptance a"),
    ("sequences", "rate · output · time of an output token (Little's law)"),
    ("first token", "own · (1 + ρ / (2·(1 − ρ))) + step (M/D/1 queue)"),
    ("cost", "devices · price of an hour / (rate · 3600 · tokens) · 10⁶"),
)  # fmt: skip


def described(
    question: Question, found: Sequence[Answer], sold: SoldAt | None = None
) -> dict[str, Any]:
    """The best answer whole, the next ones in short."""
    best = found[0]
    replica, work = best.replica, question.workload
    return {
        "model": _model(question),
        "workload": {
            "rate": work.rate,
            "prompt_tokens": work.prompt,
            "output_tokens": work.output,
            "shared_prefix_tokens": work.shared,
            "ttft_ms": _ms(work.ttft) or None,
            "tpot_ms": _ms(work.tpot) or None,
            "tokens_a_step": round(work.tokens_a_step, 4),
        },
        "memory": _memory(replica),
        "roofline": _roofline(replica),
        "plan": _plan(best),
        "knee": _state(best.knee),
        "cost": _cost(best, sold),
        "others": [_short(each) for each in found[1 : 1 + _MOST_OTHERS]],
        "device": _device(replica),
        "fit": facts_of_fit(),
        "formulas": [{"name": name, "formula": formula} for name, formula in FORMULAS],
    }


def curve(best: Answer) -> list[dict[str, Any]]:
    """Goodput over load of one replica: requests a second that meet both objectives in the mean."""
    top = max(best.knee.rate, best.state.rate) or 1.0
    points = []
    for state in best.replica.curve(1.5 * top):
        points.append(_state(state) | {"goodput": 0.0 if state.limit else _round(state.rate)})
    return points


def _model(question: Question) -> dict[str, Any]:
    shape = question.shape
    return {
        "name": shape.name,
        "parameters": shape.parameters,
        "active_parameters": shape.active,
        "layers": len(shape.layers),
        "experts": shape.experts,
        "quantization": question.precision.name,
        "weight_bytes": round(question.precision.weight_bytes(shape)),
        "kv_bytes_per_token": round(shape.cached_per_token * question.kv_bytes),
        "kv_bytes_per_request": round(
            shape.cached_values(question.workload.prompt + question.workload.output)
            * question.kv_bytes
        ),
        "adapter_bytes": 2 * question.adapters.values(shape) if question.adapters.count else 0,
    }


def _memory(replica: Replica) -> dict[str, Any]:
    memory = replica.memory
    return {
        "usable_bytes": round(memory.usable),
        "weight_bytes": round(memory.weights),
        "adapter_bytes": round(memory.adapters),
        "activation_bytes": round(memory.work),
        "cache_bytes": max(0, round(memory.for_cache)),
        "kv_bytes_per_request": round(memory.kv_per_request),
        "requests_that_fit": math.floor(memory.sequences),
        "fits": memory.fits,
    }


def _roofline(replica: Replica) -> dict[str, Any]:
    serving, work = replica.serving, replica.workload
    prompt = serving.prompt_terms(work.computed, work.shared)
    decode = serving.decode_terms(1, work.prompt + work.output / 2)
    ridge = replica.ridge()
    return {
        "prompt_s": _round(serving.prompt_s(work.computed, work.shared)),
        "prompt_terms_ms": {name: _ms(seconds) for name, seconds in prompt.items()},
        "decode_step_s": _round(serving.decode_s(1, work.prompt + work.output / 2)),
        "decode_terms_ms": {name: _ms(seconds) for name, seconds in decode.items()},
        "factors": dict(serving.factors),
        # The batch at which a decode step stops waiting for memory and begins to wait for products.
        "ridge_batch": None if math.isinf(ridge) else math.floor(ridge),
    }


def _plan(best: Answer) -> dict[str, Any]:
    return {
        "gpu": best.replica.serving.device.name,
        "layout": best.replica.serving.layout.words,
        "replicas": best.replicas + best.prefillers,
        "roles": best.roles,
        "devices": best.devices,
        "holds": best.holds,
        "rate_within_objectives": _round(best.rate),
        "goodput_used": _round(best.replica.workload.rate / best.rate) if best.rate else None,
        **_state(best.state),
    }


def _state(state: State) -> dict[str, Any]:
    return {
        "rate": _round(state.rate),
        "batch": _round(state.sequences),
        "step_ms": _ms(state.step),
        "tpot_ms": _ms(state.tpot),
        "ttft_ms": _ms(state.ttft),
        "prompt_share": _round(state.busy),
        "binds": state.binds,
        "shares": {name: _round(share) for name, share in state.shares.items()},
        "breaks": state.limit or None,
    }


def _cost(best: Answer, sold: SoldAt | None) -> dict[str, Any]:
    work = best.replica.workload
    hour = best.usd_per_hour
    found: dict[str, Any] = {
        "currency": "USD",
        "per_hour": _money(hour),
        "per_million_output_tokens": _money(best.usd_per_million(work.output)),
        "per_million_tokens": _money(best.usd_per_million(work.prompt + work.output)),
        "margin": None,
    }
    if sold is not None:
        found["margin"] = sold.margin(work, min(work.rate, best.rate), hour)
    return found


def _short(answer: Answer) -> dict[str, Any]:
    return {
        "gpu": answer.replica.serving.device.name,
        "layout": answer.replica.serving.layout.words,
        "replicas": answer.replicas + answer.prefillers,
        "roles": answer.roles,
        "devices": answer.devices,
        "holds": answer.holds,
        "rate_within_objectives": _round(answer.rate),
        "per_hour": _money(answer.usd_per_hour),
        "binds": answer.state.binds,
        "breaks": answer.state.limit or None,
    }


def _device(replica: Replica) -> dict[str, Any]:
    device = replica.serving.device
    return {
        "name": device.name,
        "memory_gb": device.memory / 1e9,
        "bandwidth_tb_s": device.bandwidth / 1e12,
        "peak_tflops": {kind: peak / 1e12 for kind, peak in device.peaks},
        "link_gb_s": device.link / 1e9,
        "source": device.source,
        "price_per_hour": device.price,
        "price_date": device.price_date or None,
        "price_source": device.price_source or None,
    }


def _ms(seconds: float) -> float:
    return _round(1000 * seconds)


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def _money(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
