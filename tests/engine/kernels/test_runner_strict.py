"""The GPU's runner without a GPU: what it asks of the device is checked as the device would."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import models, sections
from engine.batch import LAST_SAMPLED, Row, StepBatch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution import cpu_runner, cuda_graphs, gpu_runner
from engine.loop import Engine
from engine.models.load import choose_device
from engine.protocol import SamplingParams
from tests.engine.checkpoints import reference, reference_greedy, save_adapter, save_checkpoint
from tests.engine.helpers import ask, run_until_idle

from .cuda_stand_in import Launches, fake_device, numbers_on_the_host

CUDA = torch.device("cuda", 0)
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16,
        "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    },
}  # fmt: skip
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.1, "top_n_sigma": 1.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "bias": {"temperature": 1.0, "logit_bias": {3: 2.0}, "min_tokens": 3, "logprobs": 2},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with fake_device(monkeypatch) as launches:
        yield launches


def row(seq: int, tokens: list[int], start: int, params: SamplingParams, **changes: object) -> Row:
    history = [5 + i % 7 for i in range(start + len(tokens))]
    fields = {
        "seq": seq, "tokens": tokens, "start": start, "blocks": [4 * seq + i for i in range(4)],
        "adapter": None, "sample": True, "sampling": params, "choice": 0, "history": history,
        "prompt_len": 20,
    }  # fmt: skip
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def launch_steps(runner: gpu_runner.GpuRunner) -> None:
    """Prompt chunks, mixed steps and decoding steps of every kind of sampling, none of them read."""
    params = [SamplingParams(max_tokens=9, **fields) for fields in SAMPLING.values()]  # type: ignore[arg-type]
    prompts = [row(n, [5] * 20, 0, each, sample=n != 1) for n, each in enumerate(params)]
    runner.launch(StepBatch(prompts))
    for step in range(3):
        decodes = [row(n, [LAST_SAMPLED], 20 + step, each) for n, each in enumerate(params)]
        mixed = [row(30, [6] * 5, 5 * step, params[0])] if step == 1 else []
        copies = [(50, 51), (52, 53)] if step == 2 else []
        runner.launch(StepBatch([*decodes, *mixed], copies))
    for each in params:
        runner.launch(StepBatch([row(1, [7], 23, each)]))
        runner.forget(1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [False, True])
def test_a_launch_never_waits_for_the_device(device: Launches, family: str, lora: bool) -> None:
    model = models.random_model(SHAPE | FAMILIES[family], torch.bfloat16, sections.DEVICE)
    runner = models.make_runner(
        model, blocks=160, most_running=8, slots=2, enable_lora=lora, max_batch_tokens=256
    )
    runner.warm_up()
    waits = device.waits
    launch_steps(runner)
    assert device.waits == waits
    # Graphs with adapters are recorded over padding; steps with adapters run in the test below.
    assert {"shrink_kernel", "expand_kernel", "fused_kernel"}.isdisjoint(device.kernels) != lora


def test_small_steps_by_fused_linears_never_wait_for_the_device(device: Launches) -> None:
    model = models.random_model(SHAPE, torch.bfloat16, CUDA)
    runner = models.make_runner(model, 160, 8, enable_lora=False, max_batch_tokens=256)
    tiles = gpu_runner.fastest_tiles.__globals__["CANDIDATES"][0]
    runner._forward.fused_tiles = dict.fromkeys(range(1, 9), tiles)
    launch_steps(runner)
    assert "skinny_kernel" in device.kernels


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_every_name_of_the_device_can_be_made_the_current_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers_on_the_host(monkeypatch):
        torch.cuda.set_device(choose_device(name))
        torch.cuda.set_device(sections.DEVICE)
        with pytest.raises(ConfigError, match="torch finds 1, use cuda:0 to cuda:0"):
            choose_device("cuda:3")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_the_engine_starts_on_the_device_and_answers_as_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapter = str(save_adapter(checkpoint, tmp_path / "adapter", 4, 0))
    prompts = [[3 + (n * i) % 200 for i in range(n)] for n in (3, 11)]
    model = reference(checkpoint)
    expected = [reference_greedy(model, prompt, 4) for prompt in prompts]

    class Graph(cuda_graphs.CudaGraph):
        """Recorded through torch's own code; a replay computes again, as there is no device."""

        def __init__(self, function: object, pool: object = None) -> None:
            super().__init__(function, pool)  # type: ignore[arg-type]
            self._again = function

        def replay(self) -> torch.Tensor:
            super().replay()
            return self._again()  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(gpu_runner, "CudaGraph", Graph)
    config = EngineConfig(
        model=str(checkpoint), device=name, dtype="float32", num_blocks=64, max_running=2,
        max_batch_tokens=64, max_adapter_slots=1, max_lora_rank=4,
    )  # fmt: skip
    with numbers_on_the_host(monkeypatch):
        monkeypatch.setattr(gpu_runner, "fastest_tiles", lambda *_: {})
        engine = Engine(config, cpu_runner.load_runner(config))
        digest = engine.load_adapter(adapter).digest
        for number, prompt in enumerate(prompts):
            engine.submit(ask(f"r{number}", prompt), "g")
        found = run_until_idle(engine)
        engine.submit(ask("adapted", prompts[1], adapter=digest), "g")
        engine.submit(ask("sampled", prompts[0], temperature=1.0, top_p=0.9, seed=1), "g")
        run_until_idle(engine, found)
    assert [found.tokens[f"r{number}", 0] for number in range(2)] == expected
    assert len(found.tokens["sampled", 0]) == 4
    assert found.tokens["adapted", 0] != expected[1]
