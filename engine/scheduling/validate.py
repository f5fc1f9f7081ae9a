"""Validates a request before it is queued; each error names the field and the values."""

import math
from dataclasses import replace

from engine.batch import Runner
from engine.config import EngineConfig
from engine.errors import RequestError
from engine.protocol import EngineInfo, GenerateRequest, SamplingParams
from engine.scheduling.capacity import most_blocks
from engine.scheduling.search_check import check_candidates
from engine.scheduling.waiting import WaitingQueue

MOST_CHOICES = 128  # of a request; those beyond `max_running` wait for places in the batch
POOLINGS = ("", "last", "mean", "cls", "model")


def check_request(
    inputs: GenerateRequest,
    info: EngineInfo,
    config: EngineConfig,
    adapter_blocks: int,
    runner: Runner,
) -> int:
    """Returns the most positions that a choice of the request may reach, prompt included. Raises
    RequestError."""
    _check_identity(inputs)
    _check_sampling(inputs.sampling, info.vocab_size, config.max_running)
    prompt = inputs.prompt
    if not prompt:
        raise RequestError("invalid_request", "prompt is empty: send at least one token id")
    if min(prompt) < 0 or max(prompt) >= info.vocab_size:
        bad = next(t for t in prompt if not 0 <= t < info.vocab_size)
        raise RequestError(
            "invalid_request", f"prompt id {bad} is outside the vocabulary of {info.vocab_size}"
        )
    check_prediction(inputs.prediction, info)
    room = 0 if inputs.sampling.pooling else 1
    if len(prompt) + room > info.context_length:
        output = " and at least one output token must fit" if room else ""
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens{output}: "
            f"the model's context is {info.context_length}",
        )
    longest = min(info.context_length, len(prompt) + inputs.sampling.max_tokens)
    blocks = info.num_blocks - adapter_blocks
    if 0 < most_blocks(runner.sight, config) <= blocks:
        return longest
    capacity = blocks * info.block_size
    if runner.windowed is not None:
        capacity = runner.windowed.longest(blocks, info.block_size)
    if len(prompt) >= capacity:
        raise RequestError(
            "context_length_exceeded",
            f"the prompt has {len(prompt)} tokens and the engine's KV memory holds {max(0, capacity)} "
            f"({info.num_blocks} blocks of {info.block_size}, {adapter_blocks} for the adapter): "
            "raise kv_memory_bytes",
        )
    return min(longest, capacity)


def check_prediction(prediction: list[int], info: EngineInfo) -> None:
    if len(prediction) > info.context_length:
        raise RequestError(
            "invalid_request",
            f"prediction has {len(prediction)} tokens: the model's context is {info.context_length}",
        )
    if prediction and not 0 <= min(prediction) <= max(prediction) < info.vocab_size:
        raise RequestError(
            "invalid_request", f"prediction has ids outside the vocabulary of {info.vocab_size}"
        )


def check_queue(waiting: WaitingQueue, inputs: GenerateRequest, config: EngineConfig) -> None:
    """Raises RequestError where no more requests of the tenant may wait. A request counts as its
    choices. A full queue still takes those of a tenant that waits for less than its share of it."""
    tenant = inputs.namespace
    queued = waiting.choices.get(tenant, 0)
    tenants = len(waiting.by_tenant.keys() | {tenant})
    if waiting.size >= config.max_waiting and queued >= config.max_waiting // tenants:
        raise RequestError(
            "queue_full",
            f"{waiting.size} requests wait, max_waiting is {config.max_waiting}: try later",
        )
    most = config.max_waiting_per_tenant
    choices = inputs.sampling.n
    if queued and queued + choices > most:
        raise RequestError(
            "queue_full",
            f"{queued} requests of this tenant wait and this one counts as {choices}, "
            f"max_waiting_per_tenant is {most}: try later",
        )


def with_pooling(inputs: GenerateRequest, info: EngineInfo) -> GenerateRequest:
    """The request with the model's own pooling where it names none. Raises RequestError."""
    sampling = inputs.sampling
    if not sampling.pooling:
        return inputs
    if not info.pooling:
        raise RequestError(
            "unsupported_parameter",
            "this engine computes no embeddings: use one on a CPU, and a model whose pooling is "
            "last, mean or cls",
        )
    if sampling.pooling != "model":
        return inputs
    return replace(inputs, sampling=replace(sampling, pooling=info.pooling))


def _check_identity(inputs: GenerateRequest) -> None:
    if not inputs.request_id:
        raise RequestError("invalid_request", "request_id is empty")
    if not inputs.namespace or inputs.namespace.startswith("\x00"):
        raise RequestError("invalid_request", "namespace is empty or starts with NUL: use another")
    if not (math.isfinite(inputs.weight) and inputs.weight > 0):
        raise RequestError("invalid_request", f"weight is {inputs.weight}: it must be above 0")
    if inputs.deadline_s is not None and not inputs.deadline_s > 0:
        raise RequestError("deadline_exceeded", f"deadline_s is {inputs.deadline_s}: it has passed")


def _check_sampling(params: SamplingParams, vocab_size: int, max_running: int) -> None:
    def need(good: bool, field: str, rule: str) -> None:
        if not good:
            value = getattr(params, field)
            raise RequestError("invalid_request", f"{field} is {value}: it must be {rule}")

    def finite(field: str, low: float, high: float = math.inf) -> None:
        value = getattr(params, field)
        need(math.isfinite(value) and low <= value <= high, field, f"from {low:g} to {high:g}")

    scored = params.prompt_logprobs
    need(scored is None or 0 <= scored <= 100, "prompt_logprobs", "from 0 to 100")
    need(params.pooling in POOLINGS, "pooling", "last, mean, cls or model")
    if params.pooling:
        need(params.max_tokens == 0, "max_tokens", "0 with pooling")
        need(params.n == 1, "n", "1 with pooling")
        need(not params.use_beam_search, "use_beam_search", "false with pooling")
        need(params.best_of <= 1, "best_of", "1 with pooling")
        need(scored is None, "prompt_logprobs", "None with pooling")
        need(params.grammar is None, "grammar", "None with pooling")
        return
    rule = "at least 1, or with prompt_logprobs 0"
    need(params.max_tokens >= (1 if scored is None else 0), "max_tokens", rule)
    most = max_running if params.use_beam_search else max(max_running, MOST_CHOICES)
    need(1 <= params.n <= most, "n", f"from 1 to {most}")
    check_candidates(params, max_running)
    need(params.top_k >= 0, "top_k", "0 (off) or more")
    need(0 <= params.min_tokens <= params.max_tokens, "min_tokens", "from 0 to max_tokens")
    finite("temperature", 0.0)
    finite("top_p", 0.0, 1.0)
    need(params.top_p > 0, "top_p", "above 0")
    finite("min_p", 0.0, 1.0)
    finite("typical_p", 0.0, 1.0)
    need(params.typical_p > 0, "typical_p", "above 0")
    finite("top_n_sigma", 0.0)
    finite("dry_multiplier", 0.0, 100.0)
    finite("dry_base", 1.0, 4.0)
    need(params.dry_allowed_length >= 1, "dry_allowed_length", "at least 1")
    finite("lz_penalty", 0.0, 10.0)
    finite("repetition_penalty", 0.0)
    need(params.repetition_penalty > 0, "repetition_penalty", "above 0")
    finite("frequency_penalty", -100.0, 100.0)
    finite("presence_penalty", -100.0, 100.0)
    need(params.logprobs is None or 0 <= params.logprobs <= 100, "logprobs", "from 0 to 100")
    known, biased = range(vocab_size), params.logit_bias
    within = f"within the vocabulary of {vocab_size}"
    for field in ("stop_token_ids", "logprob_token_ids", "dry_breakers", "allowed_token_ids"):
        need(all(t in known for t in getattr(params, field)), field, within)
    need(all(t in known for t in biased), "logit_bias", f"for ids {within}")
    need(all(math.isfinite(b) for b in biased.values()), "logit_bias", "finite")
    words = params.bad_words
    need(len(words) <= 1024 and all(words), "bad_words", "at most 1,024 words, none empty")
    need(all(t in known for word in words for t in word), "bad_words", f"ids {within}")
