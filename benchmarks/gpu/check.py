"""Every kernel against its reference on the real device, at sizes that fill it.

Compiling takes most of the time, on one core a kernel: each kind of kernel and type is a job, and as many
processes do them as there are cores."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from multiprocessing import TimeoutError as OutOfTime
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu import check_adapters, check_latent, models
from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.models import LLAMA_8B
from benchmarks.gpu.timing import run_section
from engine.backends.gpu import attention_launch, pointwise_launch, skinny_launch
from engine.backends.gpu import pointwise_reference as plain
from engine.backends.gpu.adapters import lora_launch, skinny_lora_launch
from engine.backends.gpu.adapters.adapter_pages import AdapterTable, pack_adapter
from engine.backends.gpu.adapters.lora_chunks import chunk_of_rows, chunk_rows_for, sort_into_chunks
from engine.backends.gpu.adapters.lora_reference import LoraStep, lora_reference
from engine.backends.gpu.attention_reference import AttentionStep, paged_attention_reference
from engine.backends.gpu.formats import experts_launch
from engine.backends.gpu.formats import launch as formats
from engine.backends.gpu.launch import MAX_ROWS
from engine.backends.gpu.mixed import Mix, MixLimits
from engine.backends.layers.device.linear import DeviceLinear, product_reference
from engine.backends.layers.device.matrix import from_codes
from engine.backends.layers.device.mixture import DeviceMixture, mixture_reference
from engine.backends.layers.matrices import PARTS, SITES, part_shape
from engine.backends.layers.norm import RmsNorm
from engine.decoding.sampler import launch as sampling_launch
from engine.decoding.sampler.reference import sample_reference
from engine.model_spec import AttentionShape
from engine.models.registry import model_spec
from engine.protocol import SamplingParams

ROUNDING = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DTYPES = tuple(ROUNDING)
Pair = tuple[Tensor, Tensor]
_TESTS_S = 200.0
# Query heads, heads of keys and head dimension: one of each way through the kernel.
_HEADS = (32, 8, 128), (8, 4, 256), (14, 2, 64), (32, 32, 96)


def check_all(deadline: float) -> bool:
    """Prints one line a job, and the device's own test run where pytest is installed and time is left."""
    good = True
    jobs = [(name, dtype) for dtype in DTYPES for name in KERNELS]
    say(f"{len(jobs)} checks in {_processes()} processes")
    with get_context("spawn").Pool(_processes()) as pool:
        found = pool.imap_unordered(check_one, jobs)
        for number in range(len(jobs)):
            try:
                passed, line = found.next(timeout=max(1.0, deadline - time.monotonic()))
            except OutOfTime:
                say(f"{len(jobs) - number} checks are left out: the time is up")
                good = False
                break
            say(line)
            good &= passed
    if deadline - time.monotonic() > _TESTS_S:
        good &= run_section("tests on the device", _TESTS_S, deadline, _run_tests)
    figure("gpu_kernels_correct", float(good), "passed", at_least=1, aim=1)
    return good


def _processes() -> int:
    """Each has a context of its own on the device, of about half a gigabyte, beside its tensors."""
    return min(16, len(os.sched_getaffinity(0)))


def check_one(job: tuple[str, torch.dtype]) -> tuple[bool, str]:
    """Whether all cases of a kernel and type are right, and the line that says so."""
    name, dtype = job
    torch.manual_seed(0)
    worst, kind = 0.0, str(dtype).removeprefix("torch.")
    try:
        for label, (got, want) in KERNELS[name](dtype):
            error = relative_error(got, want)
            worst = max(worst, error / ROUNDING[got.dtype])
            if not error <= ROUNDING[got.dtype]:
                return False, f"  {name} {kind}: failed, {label}: relative error {error:.2e}"
    except Exception as error:  # a kernel that does not compile leaves the others to be tried
        return False, f"  {name} {kind}: failed, {type(error).__name__}: {error}"
    return True, f"  {name} {kind}: passed, worst error {worst:.2f} of what rounding allows"


def relative_error(got: Tensor, want: Tensor) -> float:
    """Not a number counts as an error, since no comparison with it is true."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-12))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def _attention(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for heads in _HEADS if dtype == torch.bfloat16 else _HEADS[:1]:
        yield from _attention_mixes(*heads, dtype)


def _attention_mixes(
    heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> Iterator[tuple[str, Pair]]:
    mixes = (([1] * 5, [700, 0, 15, 16, 2000]), ([1, 1, 130, 7, 400], [65, 900, 0, 513, 77]))
    kinds = (AttentionShape(dim**-0.5), AttentionShape(dim**-0.5, window=200, softcap=30.0))
    for queries, contexts in mixes:
        lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
        pages = [-(-n // 16) for n in lengths]
        data = _random(sum(pages), 2 * kv_heads, 16, dim, dtype=dtype)
        order = torch.randperm(sum(pages)).int()
        tables = torch.zeros(len(pages), max(pages), dtype=torch.int32)
        for i, (first, n) in enumerate(zip([0, *accumulate(pages)], pages, strict=False)):
            tables[i, :n] = order[first : first + n]
        rows = torch.arange(len(pages), dtype=torch.int32)
        cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        decodes = next((i for i, n in enumerate(queries) if n > 1), len(queries))
        step = AttentionStep(tables.cuda(), rows.cuda(), lens.cuda(), cu_q.cuda(), decodes)
        q = _random(sum(queries), heads, dim, dtype=dtype)
        for kind in kinds:
            want = paged_attention_reference(q, data, step, kind)
            for splits in (1, 8):
                out = torch.full_like(q, float("nan"))
                attention_launch.paged_attention(q, data, step, kind, out=out, splits=splits)
                yield f"{dtype} {heads}/{kv_heads}x{dim} {kind} splits {splits}", (out, want)
            counts = torch.tensor([decodes, len(queries), 8], dtype=torch.int32).cuda()
            mixed = replace(step, mix=Mix(counts, MixLimits(32, 64, 8, len(queries))))
            got = attention_launch.paged_attention(q, data, mixed, kind, splits=32)
            yield f"{dtype} {heads}/{kv_heads}x{dim} {kind} in a graph", (got, want)


def _lora(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    wide = LLAMA_8B | {"num_hidden_layers": 1}
    narrow = wide | {"hidden_size": 2048, "head_dim": 128, "intermediate_size": 1536}
    for raw in (wide, narrow):
        block, spec = 1 << 20, model_spec(raw)
        table = AdapterTable(spec, 4, 256, block, torch.device("cuda"))
        arena = torch.full((64, block), float("nan"), dtype=dtype, device="cuda")
        free = torch.randperm(64)
        for slot, rank in enumerate((1, 16, 40, 256)):
            matrices = {
                (0, part): (
                    torch.randn(rank, width) * width**-0.5,
                    torch.randn(rank, out) * rank**-0.5,
                )
                for part in PARTS
                for width, out in [part_shape(spec, part)]
            }
            packed = pack_adapter(matrices, 1, block, dtype)
            mine, free = free[: len(packed.image)], free[len(packed.image) :]
            arena[mine.cuda()] = packed.image.cuda()
            table.fill(slot, packed, mine)
        for tokens in (1, 9, 37, 700):
            slots = torch.randint(-1, 4, (tokens,)).sort().values
            rows = chunk_rows_for(tokens)
            order, chunks = map(torch.from_numpy, sort_into_chunks(slots.numpy(), rows))
            owners = torch.from_numpy(chunk_of_rows(order.numpy(), chunks.numpy(), tokens))
            step = LoraStep(order.cuda(), chunks.cuda(), rows, 256, chunk_of=owners.cuda())
            for name in SITES:
                site = table.site(0, name)
                x = _random(tokens, site.inputs, dtype=dtype)
                got = _random(tokens, int(site.spans[:, 1].sum()), dtype=dtype)
                want = got.clone()
                lora_launch.add_lora(got, x, arena.view(-1), site, step)
                lora_reference(want, x, arena.view(-1), site, step)
                yield f"{dtype} {tokens} tokens {name} of {site.inputs}", (got, want)
                if tokens > MAX_ROWS:
                    continue
                change = skinny_lora_launch.change_of(arena.view(-1), site, step)
                weight = _random(got.shape[1], site.inputs, dtype=dtype) * site.inputs**-0.5
                skinny_lora_launch.link(x, None, change, None)
                for tiles in skinny_launch.CANDIDATES:
                    got = skinny_launch.skinny_linear(x, weight, tiles, expand=change)
                    want = skinny_launch.skinny_reference(x, weight, change=change)
                    yield f"{dtype} {tiles} {tokens} tokens {name} fused", (got, want)


def _pointwise(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for width in (1024, 4096, 3584):
        x, norm = _random(300, width, dtype=dtype), RmsNorm(_random(width, dtype=dtype), 1e-6)
        ours, theirs = x.clone(), x.clone()
        got = pointwise_launch.rms_norm(x, norm, ours)
        want = plain.rms_norm_reference(x, norm, theirs)
        yield f"{dtype} norm {width}", (got, want)
        yield f"{dtype} residual {width}", (ours, theirs)
    for gelu in (False, True):
        x = _random(300, 2 * 14336, dtype=dtype)
        pair = pointwise_launch.gated(x, gelu), plain.gated_reference(x, gelu)
        yield f"{dtype} gated {gelu}", pair
    yield from _rotary(dtype)


def _rotary(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for heads, kv_heads, dim, normed in ((32, 8, 128, False), (16, 8, 128, True), (9, 3, 80, True)):
        slots = torch.randperm(64 * 16)[:200].int().cuda()
        slots[7] = -1
        step = plain.RotaryStep(torch.randint(0, 999, (200,)).int().cuda(), slots)
        angles = torch.outer(torch.arange(999.0), 1e4 ** -(torch.arange(dim // 2) / (dim // 2)))
        table = torch.cat((angles.cos(), angles.sin()), 1).cuda()
        norms = RmsNorm(_random(dim, dtype=dtype), 1e-6), RmsNorm(_random(dim, dtype=dtype), 1e-6)
        qkv = _random(200, (heads + 2 * kv_heads) * dim, dtype=dtype)
        caches = [torch.ones(64, 2 * kv_heads, 16, dim, dtype=dtype, device="cuda") for _ in "ab"]
        got, want = (
            f(qkv, cache, step, table, norms if normed else None)
            for f, cache in zip(
                (pointwise_launch.rotary, plain.rotary_reference), caches, strict=True
            )
        )
        yield f"{dtype} rotary {dim}", (got, want)
        yield f"{dtype} cache {dim}", (caches[0], caches[1])


def _skinny(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for tiles in skinny_launch.CANDIDATES:
        for rows, inputs, outputs in ((1, 4096, 6144), (16, 14336, 4096), (5, 1000, 777)):
            x, weight = (
                _random(rows, inputs, dtype=dtype),
                _random(outputs, inputs, dtype=dtype),
            )
            weight *= inputs**-0.5
            norm = RmsNorm(_random(inputs, dtype=dtype), 1e-6)
            got = skinny_launch.skinny_linear(x, weight, tiles, norm=norm)
            want = skinny_launch.skinny_reference(x, weight, norm=norm)
            yield f"{dtype} {tiles} {rows}x{inputs} normed", (got, want)
            if outputs % 2 == 0:
                got = skinny_launch.skinny_linear(x, weight, tiles, gate="silu")
                want = skinny_launch.skinny_reference(x, weight, gate="silu")
                yield f"{dtype} {tiles} {rows}x{inputs} gated", (got, want)
            before = _random(rows, outputs, dtype=dtype)
            want = skinny_launch.skinny_reference(x, weight, add_to=before)
            arrived = torch.zeros(outputs, dtype=torch.int32, device="cuda")
            got = skinny_launch.skinny_linear(x, weight, tiles, add_to=before, arrived=arrived)
            yield f"{dtype} {tiles} {rows}x{inputs} summed", (got, want)


def _formats(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    for stored in models.CODES:
        source = models.RandomWeights(dtype, torch.device("cuda"), False, stored)
        for rows, inputs, outputs in ((1, 4096, 6144), (16, 14336, 4096), (300, 1024, 777)):
            codes = source.codes("any", (outputs, inputs))
            assert codes is not None
            matrix = from_codes(codes)
            x = _random(rows, inputs, dtype=dtype)
            got = formats.quantized_linear(x, DeviceLinear([matrix]))
            want = product_reference(x, matrix, formats.rounds(matrix))
            yield f"{dtype} {stored} {rows}x{inputs}", (got, want)


def _experts(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    raw = models.QWEN3_30B_A3B | {"num_hidden_layers": 1, "num_experts": 32}
    for stored in ("", "int4", "fp8", "mxfp4"):
        model = models.random_model(raw, dtype, torch.device("cuda"), stored)
        mixture = model.decoder.blocks[0].mixture
        assert isinstance(mixture, DeviceMixture)
        for tokens in (1, 37, 600):
            x = _random(tokens, 2048, dtype=dtype)
            real = torch.ones(tokens, dtype=torch.bool, device="cuda")
            got = experts_launch.experts(mixture, x, real, "silu")
            few = slice(0, 20)  # the reference goes row by row
            want = mixture_reference(mixture, x[few], "silu")
            yield f"{dtype} {stored or 'float'} {tokens} tokens", (got[few], want)


def _sampling(dtype: torch.dtype) -> Iterator[tuple[str, Pair]]:
    """The choice must be the reference's, whatever the rounding."""
    kinds: list[dict[str, float]] = [
        {"temperature": 0.0}, {"top_p": 0.9}, {"top_p": 0.9, "min_p": 0.01}, {},
    ]  # fmt: skip
    for vocab in (49_152, 128_256):
        logits = 3 * _random(64, vocab, dtype=dtype)
        params = [
            SamplingParams(max_tokens=1, top_k=n // 4, **kinds[n % 4])  # type: ignore[arg-type]
            for n in range(64)
        ]
        uniforms = torch.rand(64, dtype=torch.float64).tolist()
        last = sampling_launch.LastTokens(
            torch.zeros(64, dtype=torch.int64, device="cuda"),
            torch.arange(64, dtype=torch.int32, device="cuda"),
        )
        got = sampling_launch.sample(logits, params, uniforms, last)
        same = (got == sample_reference(logits, params, uniforms)).float()
        yield f"{dtype} {vocab} ids", (same, torch.ones_like(same))


def _run_tests() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("pytest", "hypothesis")):
        say("  pytest and hypothesis are not both installed: the kernel tests are left out")
        return
    root = Path(__file__).parents[2]
    folder = root / "tests/engine/gpu"
    tests = [str(path) for path in sorted(folder.rglob("test_*.py")) if "ahead" not in path.name]
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(root)]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", "-o", f"pythonpath={root}"]
    done = subprocess.run([*command, *tests], cwd=root, stdout=sys.stderr, check=False, timeout=190)
    if done.returncode:
        raise AssertionError(f"pytest ended with {done.returncode}")


KERNELS: dict[str, Callable[[torch.dtype], Iterator[tuple[str, Pair]]]] = {
    "attention": _attention,
    "lora": _lora,
    "lengths": check_adapters.lengths,
    "latent attention": check_latent.latent,
    "pointwise": _pointwise,
    "skinny": _skinny,
    "formats": _formats,
    "experts": _experts,
    "sampling": _sampling,
}
