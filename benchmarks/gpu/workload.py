"""Many requests through the whole engine: 256 of them, 100 to 1024 tokens in and out."""

import importlib.util
import random
import time
from typing import Any

import torch

from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.sizes import Sizes, Work
from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.load import LoadedModel
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.gpu.runner import GpuRunner

Asked = list[tuple[list[int], int]]  # prompt and how many tokens to generate


def draw_work(
    work: Work, count: int, vocab: int, output: int | None = None, *, seed: int = 0
) -> Asked:
    """Other seeds give other prompts of the same lengths."""
    lengths, ids = random.Random(0), random.Random(seed)
    return [
        (
            [ids.randrange(vocab) for _ in range(lengths.randint(*work.lengths))],
            output or lengths.randint(*work.lengths),
        )
        for _ in range(count)
    ]


def run_engine(config: EngineConfig, runner: GpuRunner, work: Asked) -> float:
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


def throughput(config: EngineConfig, model: LoadedModel, runner: GpuRunner, sizes: Work) -> None:
    run_engine(config, runner, draw_work(sizes, min(16, sizes.requests), model.spec.vocab, 32))
    work = draw_work(sizes, sizes.requests, model.spec.vocab)
    seconds = run_engine(config, runner, work)
    tokens = sum(output for _, output in work)
    figure(
        "gpu_throughput_qwen3_06b", tokens / seconds, "output tokens/s",
        settings={"requests": sizes.requests, "in": sizes.lengths, "out": sizes.lengths,
                  "output_tokens": tokens, "seconds": round(seconds, 2)},
    )  # fmt: skip


def beside_transformers(
    config: EngineConfig, model: LoadedModel, runner: GpuRunner, sizes: Sizes
) -> None:
    """A smaller work that `transformers` can finish in time, done by both, each after one of the same
    lengths: both have captured their graphs."""
    if importlib.util.find_spec("transformers") is None:
        say("transformers is not installed: pip install transformers to measure beside it")
        return
    most = sizes.work
    before, work = (
        draw_work(most, most.beside_peer, model.spec.vocab, most.output, seed=seed)
        for seed in (1, 0)
    )
    tokens = sum(output for _, output in work)
    run_engine(config, runner, before)
    ours = run_engine(config, runner, work)
    peer = None
    try:
        peer = tokens / run_transformers(sizes.small, before, work)
    finally:  # our own figure stands, whatever the peer does
        figure(
            "gpu_throughput_vs_transformers", tokens / ours, "output tokens/s",
            peer="transformers continuous batching", peer_value=peer, at_least=1.0, aim=2.0,
            settings={"requests": len(work), "in": most.lengths, "out": most.output},
        )  # fmt: skip


def run_transformers(shape: dict[str, Any], before: Asked, work: Asked) -> float:
    import transformers

    raw: dict[str, Any] = {k: v for k, v in shape.items() if k != "model_type"}
    config = transformers.Qwen3Config(**raw)
    config._attn_implementation = "paged|sdpa"
    with torch.device("cuda"):
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).eval()
    asked = transformers.GenerationConfig(
        max_new_tokens=work[0][1], do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    seconds = 0.0
    for asks in (before, work):  # the manager stays, with its memory and its graphs
        prompts = [prompt for prompt, _ in asks]
        start = time.perf_counter()
        answers = model.generate_batch(
            inputs=prompts, generation_config=asked, persistent_manager=True
        )
        seconds = time.perf_counter() - start
    model.destroy_cached_continuous_batching_manager()
    short = sum(len(answer.generated_tokens) < work[0][1] for answer in answers.values())
    if short or len(answers) != len(work):
        raise RuntimeError(f"transformers gave {len(answers)} answers, {short} of them too short")
    return seconds
