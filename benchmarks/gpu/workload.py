"""Many requests through the whole engine: 256 of them, 100 to 1024 tokens in and out."""

import importlib.util
import random
import time
from typing import Any

import torch

from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.models import QWEN3_06B
from engine.config import EngineConfig
from engine.execution.gpu_runner import GpuRunner
from engine.loop import Engine
from engine.models.load import LoadedModel
from engine.protocol import GenerateRequest, SamplingParams

REQUESTS, LEAST, MOST = 256, 100, 1024
Work = list[tuple[list[int], int]]  # prompt and how many tokens to generate


def draw_work(count: int, vocab: int, output: int | None = None) -> Work:
    chance = random.Random(0)
    return [
        (
            [chance.randrange(vocab) for _ in range(chance.randint(LEAST, MOST))],
            output or chance.randint(LEAST, MOST),
        )
        for _ in range(count)
    ]


def run_engine(config: EngineConfig, runner: GpuRunner, work: Work) -> float:
    """Seconds from the first request's arrival to the last token."""
    engine = Engine(config, runner)
    start = time.perf_counter()
    for i, (prompt, output) in enumerate(work):
        sampling = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        engine.submit(GenerateRequest(f"r{i}", f"tenant{i % 4}", prompt, sampling), "bench")
    delivered = 0
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            delivered += sum(len(chunk.tokens) for chunk in outbox.chunks)
    seconds = time.perf_counter() - start
    wanted = sum(output for _, output in work)
    if delivered != wanted:
        raise RuntimeError(f"{delivered} tokens were delivered, {wanted} asked for")
    engine.check_integrity()
    return seconds


def throughput(config: EngineConfig, model: LoadedModel, runner: GpuRunner) -> None:
    run_engine(config, runner, draw_work(16, model.spec.vocab, 32))
    work = draw_work(REQUESTS, model.spec.vocab)
    seconds = run_engine(config, runner, work)
    tokens = sum(output for _, output in work)
    figure(
        "gpu_throughput_qwen3_06b", tokens / seconds, "output tokens/s",
        settings={"requests": REQUESTS, "in": [LEAST, MOST], "out": [LEAST, MOST],
                  "output_tokens": tokens, "seconds": round(seconds, 2)},
    )  # fmt: skip


def beside_transformers(config: EngineConfig, model: LoadedModel, runner: GpuRunner) -> None:
    """A smaller work that `transformers` can finish in time, done by both."""
    if importlib.util.find_spec("transformers") is None:
        say("transformers is not installed: pip install transformers to measure beside it")
        return
    work = draw_work(64, model.spec.vocab, 256)
    tokens = sum(output for _, output in work)
    ours = run_engine(config, runner, work)
    peer = None
    try:
        peer = tokens / run_transformers(work)
    finally:  # our own figure stands, whatever the peer does
        figure(
            "gpu_throughput_vs_transformers", tokens / ours, "output tokens/s",
            peer="transformers continuous batching", peer_value=peer, at_least=1.0, aim=2.0,
            settings={"requests": len(work), "in": [LEAST, MOST], "out": 256},
        )  # fmt: skip


def run_transformers(work: Work) -> float:
    import transformers

    raw: dict[str, Any] = {k: v for k, v in QWEN3_06B.items() if k != "model_type"}
    config = transformers.Qwen3Config(**raw)
    config._attn_implementation = "paged|sdpa"
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    asked = transformers.GenerationConfig(
        max_new_tokens=work[0][1], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [prompt for prompt, _ in work]
    model.generate_batch(inputs=prompts[:4], generation_config=asked)
    start = time.perf_counter()
    answers = model.generate_batch(inputs=prompts, generation_config=asked)
    seconds = time.perf_counter() - start
    short = sum(len(answer.generated_tokens) < work[0][1] for answer in answers.values())
    if short or len(answers) != len(work):
        raise RuntimeError(f"transformers gave {len(answers)} answers, {short} of them too short")
    return seconds
