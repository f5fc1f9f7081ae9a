"""Counters, gauges and histograms of one engine, and their Prometheus text.

Written by hand, so that the engine needs no metrics library. The names that vLLM's dashboards and
the Kubernetes inference gateway read are served as aliases.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


_REMOVED_ADAPTERS = 1000  # whose counts are still reported


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket that holds this share of the observations."""
        wanted = share * self.count
        total = 0
        for bound, count in zip((*self.bounds, math.inf), self.counts, strict=True):
            total += count
            if total >= wanted:
                return bound
        return math.inf


# Counter name -> (help, vLLM's name). Each is exposed as tollhouse_engine_<name>_total.
COUNTERS = {
    "prompt_tokens": ("Prompt tokens, cached and computed", "vllm:prompt_tokens_total"),
    "cached_tokens": ("Prompt tokens found in the prefix cache", None),
    "computed_tokens": ("Prompt tokens computed for the first time", None),
    "unprocessed_tokens": ("Prompt tokens never reached because the request ended", None),
    "generated_tokens": ("Output tokens accepted", "vllm:generation_tokens_total"),
    "delivered_tokens": ("Output tokens sent to gateways", None),
    "recomputed_tokens": ("Tokens computed again after a preemption, not charged", None),
    "discarded_tokens": ("Tokens sampled and discarded, not charged", None),
    "drafted_tokens": ("Tokens guessed by speculative decoding", None),
    "rejected_tokens": ("Guesses of speculative decoding that proved wrong, not charged", None),
    "voided_tokens": ("Prompt tokens computed with logits not finite, not charged", None),
    "not_finite": (
        "Requests ended because no token could be chosen, such as by logits that are not finite",
        None,
    ),
    "prefix_queries": ("Prefix cache look-ups, in tokens", "vllm:prefix_cache_queries_total"),
    "prefix_hits": ("Prefix cache hits, in tokens", "vllm:prefix_cache_hits_total"),
    "preemptions": ("Sequences preempted", "vllm:num_preemptions_total"),
    "steps": ("Steps run", None),
    "step_failures": ("Steps that failed on the device", None),
    "adapter_loads": ("Adapters loaded to the device", None),
    "adapter_evictions": ("Idle adapters evicted from the device", None),
    "tier_tokens": ("Prompt tokens that a tier had and the pool had not", None),
    "tier_timeouts": ("Prompts computed because their copies in a tier came too late", None),
    "receipts_lost": ("Receipts dropped before a gateway acknowledged them", None),
}

# Histogram name -> (help, bounds, vLLM's name).
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], str | None]] = {
    "step_seconds": ("Duration of one step", SECONDS, None),
    "step_tokens": ("Tokens in one step", TOKENS, "vllm:iteration_tokens_total"),
    "queue_seconds": ("Time before admission", SECONDS, "vllm:request_queue_time_seconds"),
    "first_token_seconds": ("Arrival to first token", SECONDS, "vllm:time_to_first_token_seconds"),
    "inter_token_seconds": (
        "Time between two tokens of a choice",
        SECONDS,
        "vllm:inter_token_latency_seconds",
    ),
    "request_seconds": ("Arrival to end", SECONDS, "vllm:e2e_request_latency_seconds"),
}

# Sums over the steps of a cell of `engine.scheduling.step_table`.
STEP_CELLS = {
    "steps": "Steps",
    "seconds": "Seconds of steps",
    "rows": "Sequences that decoded",
    "positions": "Positions before the tokens of these",
    "tokens": "Prompt tokens",
    "before": "Positions before these, of the prompt that is farthest",
}

# Gauge name -> (help, vLLM's name).
GAUGES = {
    "running": ("Sequences in the batch", "vllm:num_requests_running"),
    "waiting": ("Sequences in the queue", "vllm:num_requests_waiting"),
    "kv_usage": ("Share of blocks in use", "vllm:kv_cache_usage_perc"),
    "blocks_free": ("Blocks free or idle", None),
    "gateways": ("Gateways connected", None),
    "receipts_open": ("Receipts not acknowledged yet", None),
    "refused_handshakes": (
        "Connections of gateways refused since the start, whose CURVE keys are wrong or missing",
        None,
    ),
    "batch_invariant": ("Whether answers depend on nothing else in the batch: 1 or 0", None),
    "receipts_unwritten": ("Lines of the receipt file that wait for room on the disk", None),
}


class Metrics:
    """Counts events as they happen; the sums of the receipts must equal these counters."""

    def __init__(self) -> None:
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.histograms = {name: Histogram(b) for name, (_, b, _) in HISTOGRAMS.items()}
        self.finished: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        self.tier_blocks: dict[tuple[str, str], int] = {}  # by tier and what happened
        self.adapter_tokens: dict[str, int] = {}  # output tokens by adapter digest
        self.expert_rows: Mapping[
            int, Sequence[int]
        ] = {}  # that each expert has computed, by layer
        # Of the engine's own steps, sums by cell: labels, and values by `STEP_CELLS`.
        self.step_cells: Callable[[], Iterable[tuple[dict[str, str], Mapping[str, float]]]] = tuple
        self._removed: dict[str, None] = {}  # digests of removed adapters, oldest first

    def add(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)

    def step(self, seconds: float, tokens: int) -> None:
        self.add("steps")
        self.observe("step_seconds", seconds)
        self.observe("step_tokens", tokens)

    def finish(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def add_tier(self, label: str, event: str, count: int) -> None:
        self.tier_blocks[label, event] = self.tier_blocks.get((label, event), 0) + count

    def forget_adapter(self, digest: str) -> None:
        """Note that an adapter was removed. Its count stays until many more were, so that a scraper
        reads its last value."""
        self._removed.pop(digest, None)
        self._removed[digest] = None
        if len(self._removed) > _REMOVED_ADAPTERS:
            oldest = next(iter(self._removed))
            del self._removed[oldest]
            self.adapter_tokens.pop(oldest, None)

    def refuse(self, code: str) -> None:
        self.refused[code] = self.refused.get(code, 0) + 1


Sample = tuple[str, Mapping[str, str], float]  # suffix of the family's name, labels, value


def render(
    metrics: Metrics,
    gauges: Mapping[str, float],
    model: str,
    adapters_by_state: Mapping[str, int],
    lora: Mapping[str, str],
) -> str:
    """Prometheus text format 0.0.4. `lora` holds the labels of vLLM's lora_requests_info."""
    lines: list[str] = []
    own, label = "tollhouse_engine_", {"model_name": model}

    def add(name: str, about: str, kind: str, samples: list[Sample]) -> None:
        lines.extend((f"# HELP {name} {about}.", f"# TYPE {name} {kind}"))
        lines.extend(f"{name}{end}{_labels(labels)} {value}" for end, labels, value in samples)

    for name, (about, alias) in COUNTERS.items():
        for full in filter(None, (f"{own}{name}_total", alias)):
            add(full, about, "counter", [("", label, metrics.counters[name])])
    for name, (about, alias) in GAUGES.items():
        for full in filter(None, (own + name, alias)):
            add(full, about, "gauge", [("", label, gauges.get(name, 0))])
    for name, (about, _, alias) in HISTOGRAMS.items():
        for full in filter(None, (own + name, alias)):
            add(full, about, "histogram", _buckets(metrics.histograms[name], label))
    ended = _by("reason", metrics.finished)
    success: list[Sample] = [
        ("", label | {"finished_reason": labels["reason"]}, n) for _, labels, n in ended
    ]
    refused, tokens = _by("code", metrics.refused), _by("adapter", metrics.adapter_tokens)
    add(f"{own}requests_total", "Requests ended, by reason", "counter", ended)
    add("vllm:request_success_total", "Requests ended, by reason", "counter", success)
    add(f"{own}refusals_total", "Requests refused, by code", "counter", refused)
    add(f"{own}adapters", "Adapters, by state", "gauge", _by("state", adapters_by_state))
    add(f"{own}adapter_tokens_total", "Output tokens by adapter", "counter", tokens)
    tiers: list[Sample] = [
        ("", {"tier": label, "event": event}, n)
        for (label, event), n in dict(metrics.tier_blocks).items()
    ]
    add(f"{own}tier_blocks_total", "Copies of blocks outside the pool, by tier and event", "counter",
        tiers)  # fmt: skip
    experts: list[Sample] = [
        ("", {"layer": str(layer), "expert": str(expert)}, n)
        for layer, rows in metrics.expert_rows.items()
        for expert, n in enumerate(rows)
    ]
    add(f"{own}expert_rows_total", "Rows that each expert computed, by layer", "counter", experts)
    cells = list(metrics.step_cells())
    for name, about in STEP_CELLS.items():
        sums: list[Sample] = [("", labels, values[name]) for labels, values in cells]
        add(f"{own}step_cell_{name}_total", f"{about}, by kind and size of step", "counter", sums)
    add("vllm:lora_requests_info", "Adapters running and waiting", "gauge", [("", lora, 1)])
    return "\n".join(lines) + "\n"


def _by(label: str, counts: Mapping[str, int]) -> list[Sample]:
    return [("", {label: name}, count) for name, count in dict(counts).items()]


def _buckets(histogram: Histogram, label: dict[str, str]) -> list[Sample]:
    samples: list[Sample] = []
    total = 0
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        total += count
        edge = "+Inf" if math.isinf(bound) else f"{bound:g}"
        samples.append(("_bucket", label | {"le": edge}, total))
    return [*samples, ("_sum", label, histogram.sum), ("_count", label, total)]


def _labels(labels: Mapping[str, str]) -> str:
    def escape(value: str) -> str:
        return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{k}="{escape(v)}"' for k, v in labels.items()) + "}"
