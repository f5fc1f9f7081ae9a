"""The whole engine over the GPU's runner, with steps overlapped, and what its benchmark rests on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.load import load_model
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import CpuRunner
from tests.engine.checkpoints import save_adapter, save_checkpoint
from tests.engine.gpu.device import DEVICE

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")

runner_gpu = pytest.importorskip("engine.runners.gpu.runner")
workload = pytest.importorskip("benchmarks.gpu.workload")
models = pytest.importorskip("benchmarks.gpu.models")

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 90, "max_position_embeddings": 128,
    "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def answers(
    kind: str, checkpoint: Path, adapter: Path, bad_words: tuple[tuple[int, ...], ...] = ()
) -> dict[str, list[int]]:
    config = EngineConfig(
        model=str(checkpoint), num_blocks=40, dtype="float32", max_running=3, max_batch_tokens=12,
        max_adapter_slots=1, max_lora_rank=16, device=DEVICE if kind == "gpu" else "cpu",
    )  # fmt: skip
    model = load_model(config)
    runner = runner_gpu.GpuRunner(config, model) if kind == "gpu" else CpuRunner(config, model)
    engine = Engine(config, runner)
    digest = engine.load_adapter(str(adapter)).digest
    for i, count in enumerate((3, 2, 3, 2)):
        prompt = [3 + (7 * i + j) % 200 for j in range(5 + 4 * i)]
        sampling = SamplingParams(
            max_tokens=count, temperature=0.8 if i == 1 else 0.0, seed=i, ignore_eos=True,
            bad_words=bad_words if i == 0 else (),
        )  # fmt: skip
        ask = GenerateRequest(f"r{i}", f"t{i % 2}", prompt, sampling, digest if i == 2 else None)
        engine.submit(ask, "test")
    found: dict[str, list[int]] = {f"r{i}": [] for i in range(4)}
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                found[chunk.request_id] += chunk.tokens
            for receipt in outbox.receipts:
                assert receipt.cached + receipt.computed == receipt.prompt
    engine.check_integrity()
    return found


def test_overlapped_steps_answer_as_single_ones_do(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "base", num_hidden_layers=1)
    adapter = save_adapter(checkpoint, tmp_path / "adapter", 3, 1)
    ours, theirs = (answers(kind, checkpoint, adapter) for kind in ("gpu", "cpu"))
    assert [len(tokens) for tokens in ours.values()] == [3, 2, 3, 2]
    assert ours == theirs
    # What a row may sample next depends on an id that the host does not know at the launch.
    first, second, _ = ours["r0"]
    ours, theirs = (
        answers(kind, checkpoint, adapter, ((first, second),)) for kind in ("gpu", "cpu")
    )
    assert ours["r0"][0] == first and ours["r0"][1] != second
    assert ours == theirs


def test_the_benchmarks_work_runs_through_the_engine() -> None:
    device = torch.device(DEVICE)
    model = models.random_model(TINY, torch.float32, device)
    runner = models.make_runner(model, blocks=16, most_running=2, enable_lora=False)
    config = EngineConfig(model="random", num_blocks=16, max_running=2, enable_lora=False)
    sizes = workload.Work(requests=3, lengths=(2, 5))
    work = workload.draw_work(sizes, 3, TINY["vocab_size"])
    other = workload.draw_work(sizes, 3, TINY["vocab_size"], seed=1)
    assert [(len(prompt), output) for prompt, output in work] == [
        (len(prompt), output) for prompt, output in other
    ]
    assert work != other
    assert all(2 <= len(prompt) <= 5 and 2 <= output <= 5 for prompt, output in work)
    assert workload.run_engine(config, runner, work) > 0
    qkv, o, mlp, head = 64 * 32, 32 * 32, 3 * 48 * 32, 90 * 32
    assert models.read_once(model) == 4 * (qkv + o + mlp + head)


def test_a_token_of_a_model_with_latent_attention_reads_its_weights_once() -> None:
    """What is absorbed is as large as the matrix that it comes from."""
    shape = models.DEEPSEEK_V3 | {
        "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "vocab_size": 90, "max_position_embeddings": 64,
    }  # fmt: skip
    model = models.random_model(shape, torch.float32, torch.device("cpu"))
    attention = 40 * 24 + 24 * 4 * 20 + 40 * 40 + 4 * (12 + 10) * 32 + 4 * 10 * 40
    assert models.read_once(model) == 4 * (attention + 3 * 48 * 40 + 90 * 40)


def test_decoding_steps_with_adapters() -> None:
    decode = pytest.importorskip("benchmarks.gpu.decode")
    model = models.random_model(TINY, torch.float32, torch.device(DEVICE))
    runner = models.make_runner(model, blocks=60, most_running=2, slots=2)
    runner.adapters.keep(models.random_adapter(model.spec, 4, 0, torch.float32))
    digest = f"{0:064x}"
    needed = runner.adapter_blocks(digest)
    handle = decode.AdapterHandle(digest, 0, 1)
    runner.load_adapter(handle, list(range(needed)))
    decoding = decode.Decoding(runner, 2, 20, 2, [handle], needed)
    decoding._run(2)
    decoding.finish()
    assert decoding._at == 20 + 2 and not decoding._first


def test_steps_with_a_prompt_beside_decoding_sequences() -> None:
    mixed = pytest.importorskip("benchmarks.gpu.mixed")
    model = models.random_model(TINY, torch.float32, torch.device(DEVICE))
    runner = models.make_runner(model, blocks=60, most_running=3, enable_lora=False)
    steps = mixed.Mixed(runner, 2, 20, 2)
    steps.prompt = 20
    steps._run(2)
    steps.finish()
    rows = steps._batch().rows
    assert [len(row.tokens) for row in rows] == [1, 1, 20]
    assert not set(rows[2].blocks) & {block for row in rows[:2] for block in row.blocks}
    assert runner._graphs._graphs


def test_the_table_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    figures = pytest.importorskip("benchmarks.gpu.figures")
    figures.figure("some", 3.0, "ms", higher_is_better=False, peer="p", peer_value=6.0, aim=1.5)
    figures.say_table()
    printed = capsys.readouterr()
    assert json.loads(printed.out)["score"] == 2.0
    assert printed.err.splitlines()[-1].split() == ["some", "3", "ms", "6", "2", "1.5"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: nothing to refuse")
def test_without_a_gpu_the_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.engine_gpu import main

    assert main(["--check"]) == 1
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_the_engine_needs_no_triton_without_a_gpu() -> None:
    code = "import sys; sys.modules['triton'] = None; import engine.runners.cpu.runner, engine.loop"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_benchmark_imports_no_more_than_it_names() -> None:
    """Whatever else is installed cannot be imported."""
    code = (
        "from tests.engine.few_packages import hide_others\n"
        "hide_others()\n"
        "import benchmarks.engine_gpu, benchmarks.gpu.check, benchmarks.gpu.sections\n"
        "import engine.runners.cpu.runner\n"
        "import importlib.util\n"
        "assert importlib.util.find_spec('llguidance') is None\n"
        "assert importlib.util.find_spec('pytest') is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in is for machines without a GPU")
def test_every_section_runs_with_few_packages_and_gives_its_memory_back() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.kernels.dry_run"], check=False,
        capture_output=True, text=True, timeout=850, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *_, last = done.stdout.splitlines()
    found = json.loads(last)
    sections = pytest.importorskip("benchmarks.gpu.sections")
    names = [name for name, _, _ in sections.SECTIONS if name not in sections.OPTIONAL]
    assert [each["section"] for each in found["left"]] == names
    for each in found["left"]:
        assert each["good"], done.stderr[-3000:]
        kept = each["section"] in sections.SHARED - {"transformers"}  # one model, for these three
        assert (each["bytes"] > found["before"]) == kept, found


def test_each_call_of_the_benchmark_fits_its_time() -> None:
    engine_gpu = pytest.importorskip("benchmarks.engine_gpu")
    sections = pytest.importorskip("benchmarks.gpu.sections")
    limits = {name: seconds for name, seconds, _ in sections.SECTIONS}
    for call in sections.CALLS:
        assert limits["ceilings"] + sum(limits[name] for name in call) <= engine_gpu.SECONDS
    measured = {"ceilings"}.union(*sections.CALLS)
    assert measured == limits.keys() - sections.OPTIONAL


@pytest.mark.parametrize("name", ["throughput", "transformers"])
def test_a_section_by_itself_makes_its_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before it may have failed, or was not asked for."""
    sections = pytest.importorskip("benchmarks.gpu.sections")
    sizes = pytest.importorskip("benchmarks.gpu.sizes")
    monkeypatch.setattr(sections, "DEVICE", torch.device(DEVICE))
    monkeypatch.setattr(sections, "DTYPE", torch.float32)
    done: list[str] = []
    monkeypatch.setattr(runner_gpu.GpuRunner, "warm_up", lambda runner: done.append("warm"))
    for function in ("throughput", "beside_transformers"):
        monkeypatch.setattr(sections.workload, function, lambda *_: done.append("measured"))
    (_, _, body) = sections.bodies({name}, sizes.TOY)[-1]
    body()
    assert done == ["warm", "measured"]
