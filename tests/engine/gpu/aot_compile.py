"""Compile what a piece of code launches for a GPU without one: Triton's own front and back end and
NVIDIA's assembler run here, only the launch itself is left out. The argument is the GPU's compute
capability: 80, 90 or 100; with `float32` after it, attention of that type alone is compiled."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from engine.backends.gpu import attention_launch, overlap, pointwise_launch, skinny_launch
from engine.backends.gpu.adapters import lora_launch, rescale_launch, skinny_lora_launch
from engine.backends.gpu.adapters.lora_reference import LoraSite, LoraStep
from engine.backends.gpu.altup import launch as altup_launch
from engine.backends.gpu.attention_reference import Answers, AttentionStep
from engine.backends.gpu.formats import experts_launch
from engine.backends.gpu.formats import launch as formats
from engine.backends.gpu.latent import launch as latent_launch
from engine.backends.gpu.mixed import Mix
from engine.backends.gpu.pointwise_reference import Pairs, RotaryStep
from engine.backends.layers.alibi import Alibi
from engine.backends.layers.device.linear import DeviceLinear
from engine.backends.layers.device.matrix import DeviceMatrix, from_codes, from_floats, stacked
from engine.backends.layers.device.mixture import DeviceMixture
from engine.backends.layers.norm import LayerNorm, RmsNorm
from engine.backends.layers.packed import Codes
from engine.backends.layers.routing import Router
from engine.backends.layers.streams import StreamLayer
from engine.decoding.sampler import launch as sampling_launch
from engine.model_spec import AttentionShape, ExpertsSpec, Sight
from engine.protocol import SamplingParams

CODES = (torch.int8, torch.float8_e4m3fn)
TARGET = GPUTarget("cuda", int(sys.argv[1]), 32)


@dataclass(frozen=True)
class Compiled:
    name: str
    shared: int  # bytes of shared memory
    registers: int
    stack: int  # bytes of local memory a thread: above 0 it spills or indexes arrays
    tensor_cores: bool
    # Whether it starts before the launch before has ended, and waits for that: all that it reads or
    # writes before is a prefetch of weights.
    overlaps: bool


class AbsentDriver:
    """Answers what Triton asks of a device before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Every kernel launched inside is compiled instead; the list fills with what came out."""
    found: list[Compiled] = []
    triton.runtime.driver.set_active(AbsentDriver())  # type: ignore[arg-type]
    original = JITFunction.__getitem__

    def instead(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            found.append(_inspect(self.warmup(*args, grid=grid, **kwargs)))

        return launch

    JITFunction.__getitem__ = instead
    try:
        yield found
    finally:
        JITFunction.__getitem__ = original


def _inspect(kernel: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    counts = SimpleNamespace(**{k: int(v) for k, v in re.findall(r"(REG|STACK):(\d+)", usage)})
    ptx = kernel.asm["ptx"]
    uses_mma = "mma.sync" in ptx or "wgmma" in ptx or "tcgen05.mma" in ptx
    return Compiled(
        kernel.metadata.name, kernel.metadata.shared, counts.REG, counts.STACK, uses_mma,
        overlaps=_waits_first(ptx, kernel.metadata.launch_pdl),
    )  # fmt: skip


def _waits_first(ptx: str, overlapped: bool) -> bool:
    """Whether it waits; raises ValueError if it must and touches memory before."""
    before, *after = ptx.split("griddepcontrol.wait")
    if bool(after) != overlapped:
        raise ValueError(
            "a kernel that waits for the launch before must start early, and only that"
        )
    if after and re.search(r"(ld|st|atom|red)\.(global|relaxed|acquire)|cp\.async", before):
        raise ValueError("a kernel reads or writes before it has waited for the launch before")
    return bool(after)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


FLOATS = torch.float32 if "float32" in sys.argv else torch.bfloat16


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=FLOATS)


def attention(
    heads: int,
    kv_heads: int,
    dim: int,
    decodes: int,
    splits: int,
    codes: torch.dtype | None = None,
    *,
    beside: dict[str, Any] | None = None,
    mixed: bool = False,
    answers: Answers | None = None,
    **shape: Any,
) -> None:
    """`beside`: what else the kernel gets. `mixed`: as a graph with prompt chunks launches it, for both
    kinds of sequences."""
    cache, scales = halves(8, 2 * kv_heads, 16, dim), None
    if codes is not None:
        cache, scales = of_codes(8, 2 * kv_heads, 16, dim, codes)
    limits = attention_launch.mix_limits(32, 4, kv_heads, 8192, 132)
    mix = Mix(ints(3), limits) if mixed else None
    step = AttentionStep(ints(4, 64), ints(4), ints(4), ints(5), decodes, mix, answers)
    kind = AttentionShape(0.1, **shape)
    q = halves(32, heads, dim)
    attention_launch.paged_attention(
        q, cache, step, kind, scales=scales, splits=splits, **(beside or {})
    )


def latent(
    heads: int, decodes: int, splits: int, codes: torch.dtype | None = None, *, mixed: bool = False,
    answers: Answers | None = None, **shape: Any,
) -> None:  # fmt: skip
    """Attention over latent vectors of DeepSeek's size."""
    cache, scales = halves(8, 1, 16, 576), None
    if codes is not None:
        cache, scales = of_codes(8, 1, 16, 576, codes)
    limits = attention_launch.mix_limits(32, 4, 4, 8192, 132)
    mix = Mix(ints(3), limits) if mixed else None
    step = AttentionStep(ints(4, 64), ints(4), ints(4), ints(5), decodes, mix, answers)
    q = halves(32, heads, 576)
    attention_launch.paged_attention(
        q, cache, step, AttentionShape(0.1, **shape), scales=scales, splits=splits, rotated=64,
        out=q[..., :512],
    )  # fmt: skip


def heavy() -> None:
    """Answers that see a part of what prompts see."""
    answers = Answers(Sight(1024, 4), 40, 8)
    attention(32, 8, 128, decodes=0, splits=32, mixed=True, answers=answers)
    for codes in (None, *CODES):
        attention(32, 8, 128, decodes=4, splits=8, answers=answers, codes=codes)
        attention(32, 8, 128, decodes=0, splits=1, answers=answers, codes=codes)
        latent(128, decodes=4, splits=8, answers=answers, codes=codes)
        latent(128, decodes=0, splits=1, answers=answers, codes=codes)
    attention(8, 4, 256, decodes=0, splits=1, mixed=True, answers=answers)
    attention(14, 2, 64, decodes=0, splits=8, mixed=True, answers=answers)
    for rounded in (False, True):
        biases = {"alibi": Alibi(torch.zeros(32, 1), rounded, 0.1)}
        attention(32, 32, 128, decodes=0, splits=8, mixed=True, answers=answers, beside=biases)


def latent_rest(chunk_rows: int) -> None:
    """Placing, and adapters of what is absorbed, both ways."""
    step, norm = RotaryStep(ints(4), ints(4)), RmsNorm(halves(512), 1e-6)
    for codes in (None, *CODES):
        cache, scales = halves(8, 1, 16, 576), None
        if codes is not None:
            cache, scales = of_codes(8, 1, 16, 576, codes)
        latent_launch.place_latent(
            halves(4, 128, 576), halves(4, 128, 192), halves(4, 576), step, torch.zeros(64, 64), norm,
            kv=cache, scales=scales,
        )  # fmt: skip
    rank = 16 if chunk_rows == 16 else 256
    site = LoraSite(ints(4, 1, 2, rank), ints(4, 1), ints(1, 2), 512, 128 * 256)
    rows = LoraStep(ints(32), ints(8, 3), chunk_rows, rank)
    plain, sums = halves(32, 128, 128), halves(32, 128, 512)
    of_head = latent_launch.Rows(1, 128, 256)
    for y, x, inner, outer in (
        (sums, plain, of_head, latent_launch.Rows(0)), (plain, sums, latent_launch.Rows(0), of_head),
    ):  # fmt: skip
        latent_launch.by_head(y, x, halves(64), site, rows, inner=inner, outer=outer)


def of_codes(
    blocks: int, heads: int, page: int, dim: int, kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and their scales in the layout of the pool."""
    rows = torch.zeros(blocks, heads, page * (dim + 2), dtype=torch.uint8)
    codes = rows[..., : page * dim].unflatten(-1, (page, dim))
    return codes.view(kind), rows[..., page * dim :].view(torch.bfloat16)


def lora(tokens: int, inputs: int, widths: list[int], max_rank: int, chunk_rows: int) -> None:
    slices = len(widths)
    table = ints(4, slices, 2, max_rank)
    site = LoraSite(table, ints(4, slices), ints(slices, 2), inputs, max(widths))
    step = LoraStep(ints(tokens), ints(8, 3), chunk_rows, max_rank)
    lora_launch.add_lora(
        halves(tokens, sum(widths)), halves(tokens, inputs), halves(64), site, step
    )


def lengths(chunk_rows: int) -> None:
    site = LoraSite(ints(4, 3, 2, 1), ints(4, 3), ints(3, 2), 4096, 4096)
    rescale_launch.rescale(
        halves(32, 6144), halves(64), site, LoraStep(ints(32), ints(8, 3), chunk_rows, 16)
    )


def pointwise() -> None:
    x = halves(4, 4096)
    pointwise_launch.rms_norm(x, RmsNorm(x[0], 1e-5), x.clone())
    cache, angles, norm = halves(4, 16, 16, 128), torch.zeros(64, 128), RmsNorm(halves(128), 1e-6)
    step = RotaryStep(ints(4), ints(4))
    pointwise_launch.rotary(halves(4, 48 * 128), cache, step, angles, (norm, norm))
    for kind in CODES:
        codes, scales = of_codes(4, 16, 16, 128, kind)
        pointwise_launch.rotary(halves(4, 48 * 128), codes, step, angles, (norm, norm), scales)
    pointwise_launch.gated(halves(4, 2 * 14336))
    pointwise_launch.rms_norm(x, LayerNorm(x[0], 1e-5, x[1]), x.clone())
    by_head = LayerNorm(halves(32, 128), 1e-6), LayerNorm(halves(8, 128), 1e-6)
    for pairs in (Pairs(neighbours=True), Pairs(turned=48)):
        pointwise_launch.rotary(halves(4, 48 * 128), cache, step, angles, by_head, pairs=pairs)
    for activation in ("gelu", "gelu_tanh"):
        pointwise_launch.activated(halves(4, 14336), activation)


def altup(width: int, intermediate: int) -> None:
    """Of several residual streams, as Gemma 3n has them; the last layers have queries alone."""
    norm, x, none = RmsNorm(halves(width), 1e-6), halves(4, width), SimpleNamespace()
    streams, product = halves(4, 4, width), halves(4, width)
    for active, scale in ((0, norm.weight), (1, None)):
        layer = StreamLayer(
            active, norm, halves(4, width), halves(16, 4), halves(4, 4), scale, none, none, norm, none,
            none, norm,
        )  # fmt: skip
        for added in (None, (x, norm)):
            altup_launch.predict(layer, streams, norm, added)
        altup_launch.correct(layer, product, norm, x, streams)
    altup_launch.join(product, streams[:, 0], x, product, (norm, norm, norm))
    altup_launch.gather(altup_launch.spread(x, halves(3, 4, width))[:, 0], halves(3, 4, width))
    altup_launch.sparse_gated(halves(4, 2 * intermediate), 1.645, gelu=True)
    of_head, angles = RmsNorm(halves(256), 1e-6), torch.zeros(64, 256)
    step = RotaryStep(ints(4), ints(4))
    for kind in (None, *CODES):
        cache, scales = (
            (halves(4, 4, 16, 256), None) if kind is None else of_codes(4, 4, 16, 256, kind)
        )
        pointwise_launch.rotary(
            halves(4, 12 * 256), cache, step, angles, (of_head, of_head, of_head), scales
        )
    queries = halves(4, 8 * 256)
    pointwise_launch.rotary(queries, cache, step, angles, (of_head,), scales, stored=False)


def skinny() -> None:
    x, norm, first = halves(1, 4096), RmsNorm(halves(4096), 1e-5), skinny_launch.CANDIDATES[0]
    for tiles in skinny_launch.CANDIDATES:
        skinny_launch.skinny_linear(
            x, halves(512, 4096), tiles, bias=halves(512), norm=norm, gate="silu"
        )
    for tiles in (first, skinny_launch.CANDIDATES[-1]):
        skinny_launch.skinny_linear(
            x, halves(4096, 4096), tiles, add_to=halves(1, 4096), arrived=ints(4096)
        )
    for tiles in skinny_launch.CANDIDATES:
        skinny_launch.skinny_linear(x, halves(6144, 4096), tiles, norm=norm, rotate=rotation())


def rotation() -> skinny_launch.Rotation:
    step = RotaryStep(ints(4), ints(4))
    return skinny_launch.Rotation(step, torch.zeros(64, 128), halves(8, 16, 16, 128))


def skinny_with_adapters(rank: int, chunks: int) -> None:
    """As a layer launches them, of any tiles."""
    x, norm = halves(4, 4096), RmsNorm(halves(4096), 1e-5)
    step = LoraStep(ints(4), ints(chunks, 3), 16, rank, chunk_of=ints(4))

    def change(inputs: int, widths: list[int]) -> skinny_lora_launch.Change:
        table, count = ints(4, 7, 2, 256), len(widths)
        site = LoraSite(
            table[:, :count], ints(4, 7)[:, :count], ints(count, 2), inputs, max(widths)
        )
        return skinny_lora_launch.change_of(halves(64), site, step)

    qkv, gate_up = change(4096, [4096, 1024, 1024]), change(4096, [14336, 14336])
    output, down = change(4096, [4096]), change(14336, [4096])
    skinny_lora_launch.link(x, down, qkv, norm)
    skinny_lora_launch.link(x, output, gate_up, norm)
    skinny_lora_launch.link(x, down, None, None)
    skinny_lora_launch.link(x, None, output, None)
    for tiles in skinny_launch.CANDIDATES:
        for rotate in (None, rotation()):
            skinny_launch.skinny_linear(
                x, halves(6144, 4096), tiles, norm=norm, expand=qkv, rotate=rotate
            )
        skinny_launch.skinny_linear(
            x, halves(2 * 14336, 4096), tiles, norm=norm, gate="silu", expand=gate_up
        )
        inner = halves(4, 14336)
        skinny_launch.skinny_linear(
            inner, halves(4096, 14336), tiles, add_to=x, shrink=down, arrived=ints(4096)
        )


def sampling() -> None:
    vocab = 128_256
    rows = sampling_launch.LastTokens(torch.zeros(8, dtype=torch.int64), ints(4))
    for logits in (halves(4, vocab), torch.zeros(4, vocab)):
        for temperature in (0.0, 1.0):
            params = [SamplingParams(max_tokens=1, temperature=temperature, top_p=0.9)] * 4
            sampling_launch.sample(logits, params, [0.5] * 4, rows)


def quantized(out: int, width: int, bits: int, group: int, **how: bool) -> None:
    groups = -(-width // group)
    scales = torch.ones(out, groups)
    codes = Codes(
        torch.zeros(out, width, dtype=torch.uint8), scales,
        scales if how.get("minima") else None, bits, group, 0,
        torch.randperm(width) if how.get("sorted_groups") else None,
    )  # fmt: skip
    matrix = from_codes(codes, torch.ones(out))
    for rows in (1, 64):
        formats.product(halves(rows, width), matrix, halves(rows, out))


def eight_bits(out: int, width: int, kind: str, group: int, rounded: bool) -> None:
    groups = -(-width // group)
    codes = Codes(
        torch.zeros(out, width, dtype=torch.uint8), torch.ones(out, groups), None, 8, group,
        128 if kind == "int" else 0, kind=kind, rounded_rows=rounded,
    )  # fmt: skip
    linear = DeviceLinear([from_codes(codes)])
    for rows in (1, 64):
        formats.quantized_linear(halves(rows, width), linear)


def mixture(kind: str) -> None:
    """The products of experts of few and of many rows, and what is around them."""
    size, hidden, count, active = 1024, 2048, 4, 2

    def matrices(out: int, width: int) -> DeviceMatrix:
        made = from_floats(halves(out, width), torch.ones(out))
        if kind:
            raw, scales = torch.zeros(out, width, dtype=torch.uint8), torch.ones(out, width // 32)
            made = from_codes(Codes(raw, scales, None, 4, 32, 0, kind=kind), torch.ones(out))
        return stacked([made] * count)

    up, down = matrices(2 * size, hidden), matrices(hidden, size)
    router = Router(
        ExpertsSpec(count=count, active=active, intermediate=size, layers=frozenset({0})),
        torch.randn(count, hidden),
    )
    clamp = (1.702, 7.0) if kind == "e2m1" else None
    made = DeviceMixture(0, router, up, down, None, active, clamp)
    for tokens in (2, 256):
        real = torch.ones(tokens, dtype=torch.bool)
        experts_launch.experts(made, halves(tokens, hidden), real, "silu")


def in_float32() -> None:
    """Attention, whose sums are the most that a program keeps."""
    for heads, kv_heads, dim in ((8, 4, 256), (32, 8, 128), (14, 2, 64)):
        attention(heads, kv_heads, dim, decodes=0, splits=1)
        attention(heads, kv_heads, dim, decodes=4, splits=8)
    attention(8, 4, 256, decodes=0, splits=1, window=4096, softcap=50.0)


def all_kernels() -> None:
    attention(32, 8, 128, decodes=4, splits=8)
    attention(32, 8, 128, decodes=0, splits=1)
    attention(8, 4, 256, decodes=0, splits=1, window=4096, softcap=50.0)
    attention(14, 2, 64, decodes=4, splits=1)
    attention(32, 32, 96, decodes=0, splits=1)
    attention(32, 8, 128, decodes=4, splits=8, window=4096, first=4)
    attention(32, 8, 128, decodes=0, splits=1, window=4096, first=4)
    attention(32, 8, 128, decodes=0, splits=32, mixed=True)
    attention(8, 4, 256, decodes=0, splits=1, mixed=True, window=4096, softcap=50.0)
    attention(32, 8, 128, decodes=0, splits=8, mixed=True, codes=torch.int8)
    sinks = {"sinks": halves(64)}
    attention(64, 8, 64, decodes=4, splits=8, beside=sinks)
    attention(64, 8, 64, decodes=0, splits=1, beside=sinks, window=128)
    for rounded in (False, True):
        biases = {"alibi": Alibi(torch.zeros(32, 1), rounded, 0.1)}
        attention(32, 32, 128, decodes=4, splits=8, beside=biases)
        attention(32, 32, 128, decodes=0, splits=1, beside=biases)
    for codes in CODES:
        attention(32, 8, 128, decodes=4, splits=8, codes=codes)
        attention(32, 8, 128, decodes=0, splits=1, codes=codes)
        attention(8, 4, 256, decodes=0, splits=1, codes=codes, window=4096, softcap=50.0)
    lora(32, 4096, [4096, 1024, 1024], max_rank=16, chunk_rows=16)
    lora(1024, 14336, [4096], max_rank=256, chunk_rows=64)
    lora(32, 1024, [3072, 3072], max_rank=64, chunk_rows=16)
    for codes in (None, *CODES):
        latent(128, decodes=4, splits=8, codes=codes)
        latent(128, decodes=0, splits=1, codes=codes)
    latent(16, decodes=4, splits=8, mixed=True, window=4096, first=4)
    heavy()
    latent_rest(16)
    latent_rest(64)
    lengths(16)
    lengths(64)
    pointwise()
    altup(2048, 16384)
    skinny()
    for rank, chunks in ((16, 2), (16, 16), (256, 4)):
        skinny_with_adapters(rank, chunks)
    sampling()
    quantized(4096, 4096, 4, 128)
    quantized(17000, 256, 4, 128, minima=True, sorted_groups=True)
    quantized(4096, 256, 4, 16)
    quantized(4096, 256, 8, 32, minima=True)
    quantized(4096, 256, 8, 256)
    eight_bits(4096, 512, "e4m3", 128, rounded=False)
    eight_bits(4096, 512, "int", 512, rounded=True)
    if TARGET.arch >= 89:
        eight_bits(4096, 512, "e4m3", 128, rounded=True)
        eight_bits(4096, 512, "e4m3", 512, rounded=True)
    for kind in ("", "int", "e2m1"):
        mixture(kind)


if __name__ == "__main__":
    overlap.capability = attention_launch.capability = formats.capability = lambda: TARGET.arch
    with compiling() as kernels:
        in_float32() if FLOATS is torch.float32 else all_kernels()
    print("\n".join(json.dumps(asdict(kernel)) for kernel in kernels))  # noqa: T201
