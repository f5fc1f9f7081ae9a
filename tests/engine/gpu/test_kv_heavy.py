"""Answers that see the first positions, the last ones and the blocks of the prompt that its last queries
gave most attention to (`kv_heavy`), by the GPU's runner: the choice and the answers of `transformers`."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.layers.alibi import Alibi
from engine.backends.layers.operations import Attention
from engine.batch import AnswerSight
from engine.loop import Engine
from engine.model_spec import AttentionShape, Sight
from tests.engine.cache.test_kv_heavy import (
    BLOCK,
    HEAVY,
    OBSERVED,
    SINKS,
    WINDOW,
    expected,
    heavy_blocks,
    heavy_engine,
)
from tests.engine.cache.test_kv_window import random_ids, run
from tests.engine.checkpoints import adapted_reference, reference, save_adapter, save_checkpoint
from tests.engine.gpu.device import DEVICE, close
from tests.engine.helpers import Collected, ask
from tests.engine.models.test_family_parity import CASES
from tests.engine.quantization.test_kv import rounded_heads
from tests.engine.speculation.test_speculation import guess_from

pytest.importorskip("triton")
from engine.backends.gpu import attention_launch
from engine.backends.gpu.attention_reference import (
    Answers,
    AttentionStep,
    paged_attention_reference,
)
from engine.backends.gpu.mixed import Mix, MixLimits
from engine.backends.gpu.observed import Observed, one_sight_each
from engine.backends.gpu.sequence_rows import SequenceRows
from engine.runners.gpu import runner as gpu_runner
from tests.engine.gpu.formats.device_driver import stand_in
from tests.engine.gpu.frozen_graph import FrozenGraph
from tests.engine.gpu.test_attention import make_step, random_codes
from tests.engine.gpu.test_runner_strict import SamplingParams, row

PROTECTS = ("engine/backends/gpu", "engine/runners/gpu")
pytestmark = pytest.mark.slow

FIELDS = {
    "device": "cuda", "speculation": "off", "enable_lora": False, "max_running": 4,
    "max_batch_tokens": 64, "num_blocks": 100,
}  # fmt: skip


def answering(
    step: AttentionStep, starts: list[int], numbers: list[list[int]], answers: Answers
) -> AttentionStep:
    """The step, of sequences whose answers begin there and see these blocks."""
    tail = torch.zeros(len(step.tables), 2 + 2 * answers.blocks, dtype=torch.int32)
    for seq, (start, some) in enumerate(zip(starts, numbers, strict=True)):
        row = int(step.table_rows[seq])
        tail[row, :2] = torch.tensor([start, len(some)])
        tail[row, 2 : 2 + len(some)] = step.tables[row, some].cpu()
        tail[row, 2 + answers.blocks :][: len(some)] = torch.tensor(some)
    tables = torch.cat((step.tables, tail.to(step.tables.device)), 1)
    return AttentionStep(
        tables, step.table_rows, step.seq_lens, step.cu_q, step.decodes, step.mix, answers
    )


@pytest.mark.parametrize(
    ("kind", "first", "splits"),
    [
        ("plain", 0, 1),
        ("plain", 6, 4),
        ("codes", 6, 1),
        ("codes", 0, 4),
        ("alibi", 0, 1),
        ("rounded alibi", 6, 4),
        ("latent", 6, 1),
        ("latent", 0, 4),
        ("mixed", 0, 1),
        ("mixed", 6, 4),
    ],
)
def test_attention(kind: str, first: int, splits: int) -> None:
    """Answers of one token and of several, and prompts that see all, beside each other."""
    queries, contexts = [1, 1, 1, 37, 20], [340, 200, 60, 260, 130]
    generator = torch.Generator().manual_seed(3)
    step, blocks = make_step(queries, contexts, 16, generator)
    answers = Answers(Sight(40, first), step.tables.shape[1], 4)
    starts, numbers = [300, 1 << 30, 50, 240, 1 << 30], [[2, 9, 15], [], [], [1, 3, 4, 8], []]
    step = answering(step, starts, numbers, answers)
    heads, dim, latent = 4, 24, kind == "latent"
    layout = (blocks, 1 if latent else 4, 16, dim)
    cache, scales = torch.randn(layout, generator=generator).to(DEVICE), None
    if kind == "codes":
        cache, scales = random_codes(layout, torch.int8, generator)
    q = torch.randn(sum(queries), heads, dim, generator=generator).to(DEVICE)
    alibi = None
    if "alibi" in kind:
        slopes = torch.tensor([[0.02], [0.1], [0.005], [0.06]], device=DEVICE).bfloat16().float()
        alibi = Alibi(slopes, kind != "alibi", 0.3)
    given: dict[str, Any] = {"scales": scales, "alibi": alibi, "rotated": 8 if latent else 0}
    shape = AttentionShape(0.3)
    want = paged_attention_reference(q, cache, step, shape, **given)
    whole = AttentionStep(step.tables, step.table_rows, step.seq_lens, step.cu_q, step.decodes)
    seen = paged_attention_reference(q, cache, whole, shape, **given)
    differs = [(want[n] - seen[n]).abs().max() > 1e-3 for n in (0, 1, 2, 20, 50)]
    assert differs == [True, False, True, True, False]
    if kind == "mixed":
        counts = torch.tensor([step.decodes, len(queries), splits], dtype=torch.int32)
        mix = Mix(counts.to(DEVICE), MixLimits(splits=8, programs=12, combined=3, chunks=4))
        fields = (step.tables, step.table_rows, step.seq_lens, step.cu_q, 0, mix, answers)
        step, splits = AttentionStep(*fields), 8
    out = q[..., : dim - 8] if latent else q
    got = attention_launch.paged_attention(q, cache, step, shape, out=out, splits=splits, **given)
    close(got, want)


@pytest.mark.parametrize("heads_at_once", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "int8", "fp8", "alibi", "capped", "latent"])
def test_observed_attention(kind: str, heads_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights written out, of queries 5 to 9 at positions 41 to 45; what lies behind is not read."""
    monkeypatch.setattr("engine.backends.gpu.observed._MOST_SCORES", heads_at_once * 5 * 48)
    generator = torch.Generator().manual_seed(2)
    heads, kv_heads, dim, page = 4, 1 if kind == "latent" else 2, 12, 8
    q = torch.randn(12, heads, dim, generator=generator).to(DEVICE)
    cached = 1 if kind == "latent" else 2 * kv_heads
    values = torch.randn(9, cached, page, dim, generator=generator)
    blocks = [7, 1, 3, 8, 0, 4]
    values[4, :, 6:] = float("nan")
    cache, scales = values.to(DEVICE), None
    if kind in ("int8", "fp8"):
        codes, scales = gpu_codes(values, kind)
        cache, values = codes, rounded_heads(values.nan_to_num(), kind)
    alibi = None
    if kind == "alibi":
        alibi = Alibi(torch.rand(heads, 1, generator=generator).to(DEVICE), False, 1.0)
    shape = AttentionShape(0.4, softcap=2.0 if kind == "capped" else 0.0)
    attention = Attention(0, 0, shape, None, None, None, alibi)
    sums = torch.ones(7, device=DEVICE)
    Observed(slice(5, 10), 41, torch.tensor(blocks, device=DEVICE), sums).add(
        q, cache, scales, attention
    )
    want = torch.ones(7)
    keys = torch.cat([values[block] for block in blocks], 1)[:kv_heads].double()
    for query in range(5):
        for head in range(heads):
            count = 42 + query
            at = keys[head // (heads // kv_heads), :count]
            score = at @ q[5 + query, head].double().cpu() * 0.4
            if kind == "capped":
                score = 2 * torch.tanh(score / 2)
            if alibi is not None:
                score += float(alibi.slopes[head]) * torch.arange(count)
            for position, weight in enumerate(score.softmax(-1)):
                want[position // page] += float(weight)
    torch.testing.assert_close(sums.cpu(), want, atol=1e-4, rtol=1e-4)
    assert want[6] == 1 and want.sum() == pytest.approx(7 + 5 * heads, abs=1e-3)


def gpu_codes(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """As the pool holds them: strides of bytes between heads that codes and scales share."""
    from engine.backends.layers.quantised_kv import quantise_heads

    codes, scales = quantise_heads(values, kind == "fp8")
    blocks, heads, page, dim = values.shape
    rows = torch.zeros(blocks, heads, page * (dim + 2), dtype=torch.uint8)
    rows[..., : page * dim] = codes.flatten(2)
    rows[..., page * dim :] = scales.contiguous().view(torch.uint8).view(blocks, heads, -1)
    rows = rows.to(DEVICE)
    found = rows[..., : page * dim].unflatten(-1, (page, dim))
    found = found.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    return found, rows[..., page * dim :].view(torch.bfloat16)


def test_rows_of_both_sights_are_cut_in_two() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0)
    answer = AnswerSight(20, Sight(8), (1,))
    whole = row(1, list(range(7)), 16, params, answer=answer, drafts=2)
    parts = one_sight_each([whole, row(2, [1] * 3, 0, params, answer=answer)])
    assert [(each.start, each.tokens, each.sampled_tokens) for each in parts] == [
        (16, [0, 1, 2, 3], 0), (20, [4, 5, 6], 3), (0, [1] * 3, 1),
    ]  # fmt: skip
    before, behind = (row(1, [1] * 4, start, params, answer=answer) for start in (16, 20))
    assert one_sight_each([before, behind]) == [before, behind]


def test_tables_have_what_an_answer_sees() -> None:
    """Written once it is known, again for another table, and for nobody else's row."""
    params = SamplingParams(max_tokens=9, temperature=0.0)
    rows = SequenceRows(4, Answers(Sight(8), 10, 2))
    blocks = [30, 31, 32, 33, 34]
    first = row(1, [1], 4, params, blocks=blocks)
    (number,), changes = rows.assign([first])
    assert changes[5:] == [(number, 10, 1 << 30), (number, 11, 0)]
    chosen = row(1, [1], 5, params, blocks=blocks, answer=AnswerSight(5, Sight(8), (1, 3)))
    cells = [(10, 5), (11, 2), (12, 31), (13, 33), (14, 1), (15, 3)]
    assert rows.assign([chosen])[1] == [(number, *cell) for cell in cells]
    assert rows.assign([chosen])[1] == []
    moved = row(1, [1], 5, params, blocks=blocks[::-1], answer=chosen.answer, table_version=1)
    assert rows.assign([moved])[1][5:][2:4] == [(number, 12, 33), (number, 13, 31)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    return save_checkpoint(folder, num_hidden_layers=2, max_position_embeddings=1024)


def answers_of(engine: Engine, prompts: list[list[int]], count: int) -> Collected:
    for number, prompt in enumerate(prompts):
        engine.submit(ask(f"r{number}", prompt, count, namespace=f"t{number}"), "g")
    return run(engine)[0]


@pytest.mark.proof
@pytest.mark.parametrize(("tokens", "overlap"), [(24, True), (200, False)])
def test_answers_are_those_of_the_mask(
    llama: Path, tokens: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside each other, however the prompts are cut, with a receipt that says what was dropped."""
    prompts = [random_ids(count, count) for count in (5, 38, 91)]
    with stand_in(monkeypatch):
        monkeypatch.setattr(gpu_runner, "CudaGraph", FrozenGraph)
        engine = heavy_engine(llama, **(FIELDS | {"max_batch_tokens": tokens, "overlap": overlap}))
        found = answers_of(engine, prompts, 8)
        engine.check_integrity()
    model = reference(llama)
    for number, prompt in enumerate(prompts):
        heavy = heavy_blocks(model, prompt)
        assert len(heavy) == [0, 2, 3][number]
        assert found.tokens[f"r{number}", 0] == expected(model, prompt, 8), len(prompt)
        unseen = len(prompt) + 8 - 1 - WINDOW - SINKS - BLOCK * len(heavy)
        assert found.receipts[f"r{number}"].dropped == max(0, unseen)
    assert expected(model, prompts[2], 8, [2, 3, 4]) != found.tokens["r2", 0]


@pytest.mark.parametrize("case", ["qwen3", pytest.param("deepseek-v2", marks=pytest.mark.proof)])
def test_other_families(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, changes = CASES[case]
    checkpoint = save_checkpoint(tmp_path, family, **(changes | {"num_hidden_layers": 2}))
    prompt = random_ids(97, 2)
    with stand_in(monkeypatch):
        found = answers_of(heavy_engine(checkpoint, **FIELDS), [prompt], 4)
    assert found.tokens["r0", 0] == expected(reference(checkpoint), prompt, 4)


def test_choices_cached_prompts_and_preemption(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preempted answer computes rows of its prompt and of itself in one step."""
    prompt = random_ids(102, 3)
    answer = expected(reference(llama), prompt, 9)
    with stand_in(monkeypatch):
        engine = heavy_engine(llama, **(FIELDS | {"num_blocks": 120, "max_batch_tokens": 256}))
        engine.submit(ask("cold", prompt, 9, n=2), "g")
        found = Collected()
        while engine.busy:
            engine.step()
            found.take(engine)
            engine.check_integrity()
            ahead = [seq for seq in engine.scheduler.running if seq.output_len == 5]
            if ahead and not engine.metrics.counters["preemptions"]:
                engine._drain_launched()
                engine.scheduler._preempt(ahead[0])
        assert engine.metrics.counters["preemptions"] == 1
        assert [found.tokens["cold", n] for n in range(2)] == [answer] * 2
        engine.submit(ask("warm", prompt, 9), "g")
        warm = run(engine)[0]
    assert warm.tokens["warm", 0] == answer
    assert warm.receipts["warm"].cached == (102 - OBSERVED) // BLOCK * BLOCK


@pytest.mark.proof
def test_adapters_and_guesses(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, prompt = save_adapter(llama, tmp_path / "a", 4, 1), random_ids(88, 5)
    plain, adapted = (
        expected(model, prompt, 8)
        for model in (reference(llama), adapted_reference(llama, adapter))
    )
    with stand_in(monkeypatch):
        engine = heavy_engine(
            llama, **(FIELDS | {"enable_lora": True, "max_adapter_slots": 1, "num_blocks": 400})
        )
        digest = engine.load_adapter(str(adapter)).digest
        answers = {None: plain, digest: adapted}
        guess_from(engine, lambda seq: answers[seq.request.inputs.adapter], random.Random(1), 0.3)
        for each in answers:
            engine.submit(ask(f"{each}", prompt, 8, adapter=each), "g")
        found = run(engine)[0]
    assert {each: found.tokens[f"{each}", 0] for each in answers} == answers
    counters = engine.metrics.counters
    assert counters["drafted_tokens"] > counters["rejected_tokens"] > 0


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.proof), "fp8"])
def test_keys_and_values_in_8_bits(llama: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice and the answer of a CPU, which `cache/test_kv_heavy.py` holds against others."""
    prompt = random_ids(80, 6)
    theirs = answers_of(
        heavy_engine(llama, kv_dtype=kind, **(FIELDS | {"device": "cpu"})), [prompt], 4
    )
    with stand_in(monkeypatch):
        ours = answers_of(heavy_engine(llama, kv_dtype=kind, **FIELDS), [prompt], 4)
    assert ours.tokens == theirs.tokens
    assert ours.receipts["r0"].dropped == 80 + 3 - WINDOW - SINKS - HEAVY
