"""The GPU's runner without a GPU: what it asks of the device is checked as the device would."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import models, sections
from engine.adapters.files import AdapterWeights
from engine.backends.layers.adapter_extras import AdapterExtras, HeadChange, Rescale, TableChange
from engine.backends.layers.kv import block_bytes
from engine.batch import LAST_SAMPLED, AdapterHandle, AnswerSight, Row, StepBatch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine
from engine.model_spec import ModelSpec, Sight
from engine.models.load import choose_device
from engine.protocol import SamplingParams
from engine.runners.cpu import runner as cpu_runner
from engine.runners.gpu import cuda_graphs
from engine.runners.gpu import runner as gpu_runner
from tests.engine.checkpoints import reference, reference_greedy, save_adapter, save_checkpoint
from tests.engine.gpu.cuda_stand_in import (
    MEMORY,
    Launches,
    cache_operations,
    fake_device,
    numbers_on_the_host,
)
from tests.engine.helpers import ask, run_until_idle
from tests.engine.quantization.test_kv import greedy_over

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu", "benchmarks/gpu")
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
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 48, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
GEMMA3N = {
    "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "head_dim": 16,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 900, "laurel_rank": 8, "altup_num_inputs": 3,
}  # fmt: skip
FAMILIES = {
    "llama": {},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "head_dim": 16,
        "sliding_window": 8, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": 16,
        "num_hidden_layers": 3, "sliding_window": 8, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh",
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layers": [1, 0],
    },
    "bloom": {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom", "n_layer": 2, "n_head": 4,
    },
    "falcon": {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},
    "cohere": {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "use_qk_norm": True},
    "deepseek_v3": DEEPSEEK,
    "gemma3n": GEMMA3N,
}  # fmt: skip
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    "min_p": {"temperature": 0.8, "min_p": 0.1, "top_n_sigma": 1.0},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    "typical": {"temperature": 0.8, "typical_p": 0.5},
    "allowed": {"temperature": 0.8, "allowed_token_ids": (3, 4, 700)},
    "repeats": {
        "temperature": 0.0,
        "dry_multiplier": 1.0,
        "lz_penalty": 0.2,
        "bad_words": ((5, 6),),
    },
    "bias": {"temperature": 1.0, "logit_bias": {3: 2.0}, "min_tokens": 3, "logprobs": 2},
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    with fake_device(monkeypatch) as launches:
        cache_operations(monkeypatch)
        yield launches


def row(seq: int, tokens: list[int], start: int, params: SamplingParams, **changes: object) -> Row:
    history = [5 + i % 7 for i in range(start + len(tokens))]
    fields = {
        "seq": seq, "tokens": tokens, "start": start, "blocks": [4 * seq + i for i in range(4)],
        "adapter": None, "sample": True, "sampling": params, "choice": 0, "history": history,
        "prompt_len": 20,
    }  # fmt: skip
    return Row(**{**fields, **changes})  # type: ignore[arg-type]


def load_adapters(runner: gpu_runner.GpuRunner, spec: ModelSpec) -> list[AdapterHandle]:
    """One of rank 5 and one of rank 16, in the last blocks."""
    handles = []
    last = runner.info.num_blocks
    for slot, rank in enumerate((5, 16)):
        weights = models.random_adapter(spec, rank, slot + 1, torch.bfloat16)
        runner.adapters.keep(weights)
        count = runner.adapter_blocks(weights.digest)
        handles.append(AdapterHandle(weights.digest, slot, 1))
        runner.load_adapter(handles[-1], list(range(last - count, last)))
        last -= count
    return handles


def launch_adapter_steps(runner: gpu_runner.GpuRunner, handles: list[AdapterHandle]) -> None:
    """Prompt chunks, mixed and decoding steps whose rows have adapters, or have none."""
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    asked = [handles[0], None, handles[1], handles[0]]
    for tokens in (20, 70):
        rows = [
            row(n, [5] * tokens, 0, greedy, adapter=each, blocks=[n] * 8)
            for n, each in enumerate(asked)
        ]
        runner.launch(StepBatch(rows))
        for step in range(3):
            decodes = [
                row(n, [LAST_SAMPLED], tokens + step, greedy, adapter=each, blocks=[n] * 8)
                for n, each in enumerate(asked)
            ]
            mixed = [row(30, [6] * 5, 5 * step, greedy, adapter=handles[1])] if step == 1 else []
            runner.launch(StepBatch([*decodes, *mixed]))
        for n in range(4):
            runner.forget(n)
    runner.unload_adapter(handles[0])


def launch_steps(runner: gpu_runner.GpuRunner) -> None:
    """Prompt chunks, mixed steps and decoding steps of every kind of sampling, none of them read."""
    params = [SamplingParams(max_tokens=9, **fields) for fields in SAMPLING.values()]  # type: ignore[arg-type]
    prompts = [row(n, [5] * 20, 0, each, sample=n != 1) for n, each in enumerate(params)]
    runner.launch(StepBatch(prompts))
    for step in range(3):
        decodes = [row(n, [LAST_SAMPLED], 20 + step, each) for n, each in enumerate(params)]
        mixed = [row(30, [6] * 5, 5 * step, params[0])] if step == 1 else []
        copies = [(50, 51), (52, 53)] if step == 2 else []
        parts = [(200, 201)] if copies and runner.windowed is not None else []
        runner.launch(StepBatch([*decodes, *mixed], copies, parts))
    for each in params:
        runner.launch(StepBatch([row(1, [7], 23, each)]))
        runner.forget(1)


def launch_prompts(runner: gpu_runner.GpuRunner) -> None:
    """Of lengths around those of graphs and tiles."""
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for tokens in (1, 2, 16, 17, 255, 256):
        many = [row(n, [5] * tokens, 0, params, blocks=[n] * 20) for n in range(2)]
        runner.launch(StepBatch(many))


def in_suite(*named: tuple[str, str, bool]) -> list[Any]:
    """Of every family, with adapters and without: others than those named are left to `make proofs`."""
    kinds = [(family, "auto") for family in FAMILIES]
    kinds += [("llama", "int8"), ("qwen3", "fp8"), ("deepseek_v3", "fp8")]
    every = [(*kind, lora) for lora in (False, True) for kind in kinds]
    assert set(named) < set(every)
    return [pytest.param(*each, marks=() if each in named else pytest.mark.proof) for each in every]


@pytest.mark.parametrize(
    ("family", "kv_dtype", "lora"),
    in_suite(
        ("gemma3n", "auto", False),
        ("qwen3", "fp8", False),
        ("llama", "int8", True),
        ("bloom", "auto", True),
        ("gemma3", "auto", True),
        ("deepseek_v3", "auto", True),
    ),
)
def test_a_launch_waits_neither_for_the_device_nor_for_a_kernel(
    device: Launches,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    kv_dtype: str,
    lora: bool,
) -> None:
    """With graphs of mixed steps up to 48 tokens: what they record differs by their numbers alone."""
    graph_sizes = cuda_graphs.graph_sizes
    monkeypatch.setattr(cuda_graphs, "graph_sizes", lambda most: graph_sizes(min(most, 48)))
    # This device's clock finds no tiles faster: those of the next test are chosen.
    measured = gpu_runner.fastest_tiles.__globals__
    monkeypatch.setitem(measured, "CANDIDATES", measured["CANDIDATES"][:1])
    model = models.random_model(SHAPE | FAMILIES[family], torch.bfloat16, sections.DEVICE)
    runner = models.make_runner(
        model, blocks=400, most_running=16, slots=2, enable_lora=lora, max_batch_tokens=512,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    runner.warm_up()
    waits, warm = device.waits, set(device.variants)
    launch_steps(runner)
    launch_prompts(runner)
    if lora:
        launch_adapter_steps(runner, load_adapters(runner, model.spec))
    assert device.waits == waits
    assert not device.variants - warm
    assert {"shrink_kernel", "expand_kernel", "fused_kernel"}.isdisjoint(device.kernels) != lora


@pytest.mark.parametrize("lora", [False, True])
def test_mixed_steps_of_few_tokens_are_replayed_and_others_launched(
    device: Launches, lora: bool
) -> None:
    model = models.random_model(SHAPE, torch.bfloat16, CUDA)
    runner = models.make_runner(model, 400, 16, slots=2, enable_lora=lora, max_batch_tokens=512)
    runner.warm_up()
    handle = load_adapters(runner, model.spec)[0] if lora else None
    params = SamplingParams(max_tokens=9, temperature=0.0)

    def launched(decodes: int, prompt: int, sample: bool = True) -> tuple[int, bool]:
        """Graphs, and whether attention was launched by itself."""
        before = len(device.kernels)
        rows = [row(n, [5], 20, params, adapter=handle, sample=sample) for n in range(decodes)]
        chunk = row(30, [6] * prompt, 0, params, blocks=[9] * 20, sample=sample)
        runner.launch(StepBatch([*rows, chunk]))
        new = device.kernels[before:]
        return new.count("graph"), "attention_kernel" in new

    assert launched(0, 2) == launched(3, 17) == launched(10, 246) == (1, False)
    assert launched(10, 247) == launched(0, 300) == (0, True)
    assert launched(3, 17, sample=False) == (0, True)


# Above 2,048 inputs LoRA takes two kernels, but for the steps of few rows that are fused; from 4,096 on
# programs share the inputs of a tile there.
@pytest.mark.parametrize(
    ("lora", "intermediate", "kv_dtype", "fused"),
    [
        (True, 112, "auto", True),
        (True, 2304, "auto", False),
        (False, 4608, "auto", True),
        *(
            pytest.param(*each, fused, marks=pytest.mark.proof)
            for fused in (False, True)
            for each in (
                (False, 112, "auto"),
                (True, 112, "int8"),
                (True, 112 if not fused else 2304, "auto"),
            )
        ),
        pytest.param(False, 4608, "auto", False, marks=pytest.mark.proof),
    ],
)
def test_no_request_waits_for_a_kernel_to_compile(
    device: Launches,
    monkeypatch: pytest.MonkeyPatch,
    lora: bool,
    intermediate: int,
    kv_dtype: str,
    fused: bool,
) -> None:
    if fused:
        tiles = gpu_runner.fastest_tiles.__globals__["CANDIDATES"]
        monkeypatch.setattr(
            gpu_runner, "fastest_tiles", lambda size, *_: {size: tiles[-size.bit_length() % 4]}
        )
    shape = SHAPE | {"intermediate_size": intermediate, "head_dim": 32}
    model = models.random_model(shape, torch.bfloat16, sections.DEVICE)
    runner = models.make_runner(
        model, blocks=400, most_running=16, slots=2, enable_lora=lora, max_batch_tokens=512,
        kv_dtype=kv_dtype,
    )  # fmt: skip
    runner.warm_up()
    warm = set(device.variants)
    launch_steps(runner)
    launch_prompts(runner)
    if lora:
        params = SamplingParams(max_tokens=9, temperature=0.0)
        handles = load_adapters(runner, model.spec)
        for tokens in (2, 8, 16):  # of one adapter, as no graph of 16 rows has
            one = row(31, [5] * tokens, 0, params, blocks=[9], adapter=handles[1], sample=False)
            runner.launch(StepBatch([one]))
        launch_adapter_steps(runner, handles)
    assert not device.variants - warm
    assert ("link_kernel" in device.kernels) == (fused and lora)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("family", ["llama", "bloom", "deepseek_v3"])
def test_prompts_that_are_observed_and_answers_that_see_less(
    device: Launches, family: str, kv_dtype: str
) -> None:
    """No launch waits for the device, nothing is compiled, and answers are replayed as graphs."""
    model = models.random_model(SHAPE | FAMILIES[family], torch.bfloat16, sections.DEVICE)
    runner = models.make_runner(
        model, blocks=400, most_running=16, enable_lora=False, max_batch_tokens=512,
        kv_dtype=kv_dtype, kv_window=24, kv_sinks=4, kv_heavy=32,
    )  # fmt: skip
    runner.warm_up()
    warm, waits, params = set(device.variants), device.waits, SamplingParams(max_tokens=9)
    sight = AnswerSight(150, Sight(24, 4), (2, 5))
    for count in (1, 3):
        for start, tokens, observed in ((0, 100, 86), (100, 50, 86), (150, 1, None)):
            answer = None if observed is not None else sight
            rows = [
                row(n, [5] * tokens, start, params, blocks=list(range(n, n + 12)), sample=start > 0,
                    observed=observed, answer=answer)
                for n in range(count)
            ]  # fmt: skip
            before = len(device.kernels)
            ticket = runner.launch(StepBatch(rows))
            assert ("graph" in device.kernels[before:]) == (start == 150)
            assert len(ticket.attention) == (count if start == 100 else 0)
        recomputed = [row(n, [5] * 9, 146, params, answer=sight, blocks=[9] * 12) for n in (0, 1)]
        runner.launch(StepBatch(recomputed))
        for n in range(3):
            runner.forget(n)
    assert device.waits == waits
    assert not device.variants - warm


def test_the_pool_leaves_room_for_what_the_largest_step_takes(
    device: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = SHAPE | {"num_hidden_layers": 64, "head_dim": 128, "num_attention_heads": 32}
    large |= {"num_key_value_heads": 32, "max_position_embeddings": 4096}
    model = models.random_model(large, torch.bfloat16, CUDA)
    each = block_bytes(model.spec, 16, torch.bfloat16)
    device.allocated, sizes, tokens = 9 << 30, [], []
    run_prompts = gpu_runner.GpuRunner.run_prompts

    def noted(runner: gpu_runner.GpuRunner, count: int, most: int) -> None:
        tokens.append(count)
        run_prompts(runner, count, most)

    monkeypatch.setattr(gpu_runner.GpuRunner, "run_prompts", noted)
    for peak in (9 << 30, 19 << 30):
        device.peak = peak
        runner = models.make_runner(
            model, blocks=None, most_running=64, enable_lora=False, max_batch_tokens=512
        )
        sizes.append(runner.info.num_blocks * each)
    assert tokens == [512, 256] * 2
    assert sizes[0] < 0.96 * MEMORY
    # The peak of the largest step, and of the largest graph.
    assert sizes[0] - sizes[1] == pytest.approx(0.95 * 2 * (10 << 30), rel=0.01)


def test_small_steps_by_fused_linears_never_wait_for_the_device(device: Launches) -> None:
    model = models.random_model(SHAPE, torch.bfloat16, CUDA)
    runner = models.make_runner(model, 160, 16, enable_lora=False, max_batch_tokens=256)
    tiles = gpu_runner.fastest_tiles.__globals__["CANDIDATES"][0]
    runner._forward.fused_tiles = dict.fromkeys(range(1, 9), tiles)
    launch_steps(runner)
    assert "skinny_kernel" in device.kernels


def test_an_adapters_pinned_copy_is_counted_as_torch_allocates_it(device: Launches) -> None:
    """In powers of two: counted by its size, copies would take up to twice their budget."""
    model = models.random_model(SHAPE, torch.bfloat16, CUDA)
    runner = models.make_runner(model, 160, 8, enable_lora=True, max_batch_tokens=256)
    weights = models.random_adapter(model.spec, 5, 1, torch.bfloat16)
    runner.adapters.keep(weights)
    image = runner.adapters._copies[weights.digest].image.nbytes
    held = runner.adapter_host_bytes(weights.digest)
    assert held.bit_count() == 1
    assert image < held < 2 * image


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_every_name_of_the_device_can_be_made_the_current_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with numbers_on_the_host(monkeypatch):
        torch.cuda.set_device(choose_device(name))
        torch.cuda.set_device(sections.DEVICE)
        with pytest.raises(ConfigError, match="torch finds 1, use cuda:0 to cuda:0"):
            choose_device("cuda:3")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_a_pool_of_codes_is_counted_and_copied_out_by_its_bytes(
    device: Launches, kv_dtype: str
) -> None:
    model = models.random_model(SHAPE | {"head_dim": 64}, torch.bfloat16, CUDA)
    fields = {"most_running": 8, "enable_lora": False, "max_batch_tokens": 256}
    blocks = {
        kind: models.make_runner(
            model, None, kv_memory_bytes=1 << 20, kv_dtype=kind, **fields
        ).info.num_blocks
        for kind in ("auto", kv_dtype)
    }
    assert blocks[kv_dtype] / blocks["auto"] >= 1.9
    runner = models.make_runner(model, 20, kv_dtype=kv_dtype, **fields)
    assert runner.info.dtype == f"bfloat16/{kv_dtype}"
    assert runner.block_bytes == 2 * 4 * 16 * 66
    runner.write_blocks([3, 7], [bytes(runner.block_bytes)] * 2)
    runner.read_blocks([7, 3])


def test_a_pool_of_pages_is_counted_and_copied_out_by_its_bytes(device: Launches) -> None:
    """Of 1 layer without a window and 2 with one: a whole block is 3 pages."""
    model = models.random_model(SHAPE | FAMILIES["gemma3"], torch.bfloat16, CUDA)
    fields = {"most_running": 8, "enable_lora": False, "max_batch_tokens": 256}
    page = 4 * 16 * 16 * 2
    runner = models.make_runner(model, None, kv_memory_bytes=40 * 3 * page, **fields)
    assert runner.windowed is not None and runner.windowed.part == 2
    assert (runner.info.num_blocks, runner.block_bytes, runner.bare_bytes) == (40, 3 * page, page)
    assert runner.pool.data.shape[:2] == (120, 1) and runner.pool.data is runner.pool.parts
    runner.write_blocks([3, 7], [bytes(3 * page), bytes(page)])
    runner.windowed.slots[7] = -1
    assert [len(runner.pool.pieces(block)) for block in (3, 7)] == [3, 1]
    runner.read_blocks([7, 3])


@pytest.mark.parametrize(
    ("name", "kv_dtype"), [("auto", "auto"), pytest.param("cuda", "int8", marks=pytest.mark.proof)]
)
def test_the_engine_starts_on_the_device_and_answers_as_transformers(
    name: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapter = str(save_adapter(checkpoint, tmp_path / "adapter", 4, 0))
    prompts = [[3 + (n * i) % 200 for i in range(n)] for n in (3, 11)]
    model = reference(checkpoint)
    expected = [
        reference_greedy(model, prompt, 4)
        if kv_dtype == "auto"
        else greedy_over(model, kv_dtype, prompt, 4)
        for prompt in prompts
    ]

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
        max_batch_tokens=40, max_adapter_slots=1, max_lora_rank=4, kv_dtype=kv_dtype,
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


def adapters_of_other_kinds(spec: ModelSpec) -> list[AdapterWeights]:
    """One with DoRA, one with a token table and a head of its own, in pairs and whole."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator).bfloat16()

    plain = models.random_adapter(spec, 4, 1, torch.bfloat16)
    factors = {
        key: Rescale(random(b.shape[1]), random(b.shape[1]) if key[1] == "q" else None)
        for key, (_, b) in plain.matrices.items()
    }
    table = TableChange(random(spec.vocab, spec.hidden), None, Rescale(random(spec.hidden)))
    pair = random(spec.hidden, 4), random(4, spec.vocab)
    head = HeadChange(random(spec.vocab, spec.hidden), pair, None)
    return [
        replace(plain, extras=AdapterExtras(rescales=factors)),
        AdapterWeights("f" * 64, 1, {}, AdapterExtras(table=table, head=head)),
    ]


def test_adapters_of_other_kinds_wait_only_where_a_graph_is_recorded(device: Launches) -> None:
    """Torch waits for the device before it records: the first step of each size that has DoRA."""
    model = models.random_model(SHAPE, torch.bfloat16, CUDA)
    runner = models.make_runner(model, 400, 16, slots=2, enable_lora=True, max_batch_tokens=512)
    runner.warm_up()
    handles, last = [], 400
    for slot, weights in enumerate(adapters_of_other_kinds(model.spec)):
        runner.adapters.keep(weights)
        count = runner.adapter_blocks(weights.digest)
        handles.append(AdapterHandle(weights.digest, slot, 1))
        runner.load_adapter(handles[-1], list(range(last - count, last)))
        last -= count
    waits, warm, before = device.waits, set(device.variants), len(device.kernels)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    for tokens in (1, 20, 300):
        rows = [
            row(n, [5] * tokens, 0, params, adapter=handles[0], blocks=[n] * 20) for n in (0, 1)
        ]
        runner.launch(StepBatch(rows))
    assert not device.variants - warm  # of DoRA, none waits for a kernel to compile
    assert {"rescale_kernel", "graph"} <= set(device.kernels[before:])
    launch_adapter_steps(runner, handles)
    recorded = sum(key.rescaled for key in runner._graphs._graphs)
    assert device.waits - waits == recorded > 0
    runner.load_adapter(handles[0], list(range(380, 400)))
    again = [row(n, [5], 30, params, adapter=handles[0], blocks=[n] * 20) for n in (0, 1)]
    runner.launch(StepBatch(again))
    assert device.waits - waits == recorded
