"""A plan in tables for a terminal."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from engine.planning.plan import Question, answers

_ROUNDS = 12


def at_concurrency(question: Question, concurrency: float) -> Question:
    """The same question at the rate that so many requests at once give: Little's law, by iteration over
    the layout that is chosen."""
    for _ in range(_ROUNDS):
        best = answers(question)[0]
        state = best.state
        work = question.workload
        rate = concurrency / (state.ttft + work.output * state.tpot)
        following = (work.rate + rate) / 2
        if abs(following - work.rate) < 1e-4 * work.rate:
            break
        question = replace(question, workload=replace(work, rate=following))
    return question


def of_plan(shown: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(title, mapping or rows)"""
    model, memory, plan, cost = (shown[name] for name in ("model", "memory", "plan", "cost"))
    yield (
        model["name"] or "model",
        {
            "parameters": f"{model['parameters'] / 1e9:.2f} B, "
            f"{model['active_parameters'] / 1e9:.2f} B a token",
            "weights": f"{_bytes(model['weight_bytes'])} as {model['quantization']}",
            "KV": f"{_bytes(model['kv_bytes_per_token'])} a token, "
            f"{_bytes(model['kv_bytes_per_request'])} a request",
            "an adapter": _bytes(model["adapter_bytes"]) if model["adapter_bytes"] else None,
            "a replica's memory": f"{_bytes(memory['usable_bytes'])} usable, "
            f"{_bytes(memory['weight_bytes'])} weights, {_bytes(memory['cache_bytes'])} cache",
            "requests that fit": memory["requests_that_fit"],
        },
    )
    roofline = shown["roofline"]
    yield (
        "times",
        {
            "prompt": f"{1000 * roofline['prompt_s']:.1f} ms",
            "decode step, alone": f"{1000 * roofline['decode_step_s']:.2f} ms",
            "ridge": _ridge(roofline["ridge_batch"]),
            "knee": f"{shown['knee']['rate']:g} requests/s of a replica, "
            f"{shown['knee']['batch']:g} at once",
            "what the knee is": _breaks(shown["knee"]),
        },
    )
    yield ("plan", _plan(plan) | _cost(cost) | {"price of a device": _price(shown["device"])})
    yield ("other ways", shown["others"])


def _plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    used = plan["goodput_used"]
    return {
        "devices": f"{plan['devices']} × {plan['gpu']}",
        "layout": f"{plan['replicas']} × {plan['layout']}, roles: {plan['roles']}",
        "objectives": "hold"
        if plan["holds"]
        else f"do not hold: {plan['breaks'] or 'too few devices'}",
        "first token": f"{plan['ttft_ms']:g} ms",
        "output token": f"{plan['tpot_ms']:g} ms",
        "at once": f"{plan['batch']:g} of a replica",
        "goodput": f"{plan['rate_within_objectives']:g} requests/s"
        + (f", {100 * used:.0f} % used" if used else ""),
        "binds": f"{plan['binds']} ("
        + ", ".join(f"{name} {100 * share:.0f} %" for name, share in plan["shares"].items())
        + ")",
    }


def _cost(cost: Mapping[str, Any]) -> dict[str, Any]:
    margin = cost["margin"]
    shown = None
    if margin is not None and margin["per_hour"] is not None:
        shown = f"{margin['per_hour']} USD an hour at the price {margin['price']}"
        if margin["share"] is not None:
            shown += f", {100 * margin['share']:.0f} % of revenue"
    return {
        "cost of an hour": _usd(cost["per_hour"]),
        "cost of a million output tokens": _usd(cost["per_million_output_tokens"]),
        "cost of a million tokens": _usd(cost["per_million_tokens"]),
        "margin": shown,
    }


def _price(device: Mapping[str, Any]) -> str:
    if device["price_per_hour"] is None:
        return "not known: give --gpu-price"
    dated = f" on {device['price_date']}" if device["price_date"] else ""
    return f"{device['price_per_hour']} USD an hour ({device['price_source']}{dated})"


def _usd(value: float | None) -> str | None:
    return None if value is None else f"{value} USD"


def _ridge(batch: int | None) -> str:
    if batch is None:
        return "bandwidth binds at every batch"
    return f"bandwidth binds below {batch} sequences, compute above"


_REASONS = {
    "memory": "the cache is full",
    "compute": "prompts take all of the time",
    "ttft": "the first token is as late as the objective",
    "tpot": "an output token takes as long as the objective",
}


def _breaks(knee: Mapping[str, Any]) -> str:
    return _REASONS.get(knee["breaks"] or "", "the highest rate that holds the objectives")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError
