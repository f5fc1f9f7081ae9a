"""Reads the load of an OpenAI-compatible server from its /metrics page."""

import math
import re

from engine.protocol import EngineStats

# vLLM, SGLang, llama.cpp, TGI; the first that is present counts.
_RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "llamacpp:requests_processing",
    "tgi_batch_current_size",
)
_WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "llamacpp:requests_deferred",
    "tgi_queue_size",
)
_KV_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPTS = ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count")
_CONFIG = re.compile(r'^vllm:cache_config_info\{.*?num_gpu_blocks="(\d+)"', re.MULTILINE)
_WANTED = frozenset((*_RUNNING, *_WAITING, *_KV_USED, *_PROMPTS))
_PROMPT_TOKENS = 256.0  # assumed for a waiting request if the server reports no prompt lengths


def stats_of(page: str) -> EngineStats | None:
    """None for a page without load metrics. `tokens_waiting` is the number of waiting requests times
    the server's mean prompt length."""
    values = _values(page)
    running = next((values[name] for name in _RUNNING if name in values), None)
    waiting = next((values[name] for name in _WAITING if name in values), None)
    if running is None and waiting is None:
        return None
    used = next((values[name] for name in _KV_USED if name in values), 0.0)
    config = _CONFIG.search(page)
    blocks = int(config[1]) if config else 0
    total, count = (values.get(name, 0.0) for name in _PROMPTS)
    mean = total / count if count else _PROMPT_TOKENS
    return EngineStats(
        running=int(running or 0),
        waiting=int(waiting or 0),
        blocks_free=max(0, math.floor(blocks * (1.0 - used))),
        blocks_total=blocks,
        tokens_waiting=round((waiting or 0) * mean),
    )


def _values(page: str) -> dict[str, float]:
    """Values summed over labels, since one server may run several engines."""
    values: dict[str, float] = {}
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _WANTED:
            try:
                value = float(line.rpartition(" ")[2])
            except ValueError:
                continue
            if math.isfinite(value):
                values[name] = values.get(name, 0.0) + value
    return values
