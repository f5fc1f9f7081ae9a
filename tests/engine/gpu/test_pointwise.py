"""RMS norm, rotary with KV write and the gated activation: each kernel against plain torch."""

import pytest
import torch

from engine.backends.gpu import pointwise_reference as reference
from engine.backends.gpu.pointwise_reference import Pairs, RotaryStep
from engine.backends.layers.linear import activate
from engine.backends.layers.norm import LayerNorm, RmsNorm
from tests.engine.gpu.device import DEVICE, close
from tests.engine.quantization.test_kv import rounded_heads

kernels = pytest.importorskip("engine.backends.gpu.pointwise_launch")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "offset"), [(64, False), (100, True), (1536, False)])
def test_rms_norm(width: int, offset: bool, dtype: torch.dtype) -> None:
    x, norm = (
        random(5, width, dtype=dtype),
        RmsNorm(random(width, dtype=dtype, seed=1), 1e-5, offset),
    )
    want = reference.rms_norm_reference(x, norm)
    close(kernels.rms_norm(x, norm), want)
    close(kernels.rms_norm(x[::2], norm), want[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_residual(dtype: torch.dtype) -> None:
    x, norm = random(3, 96, dtype=dtype), RmsNorm(random(96, dtype=dtype, seed=1), 1e-6)
    ours, theirs = (random(3, 96, dtype=dtype, seed=2) for _ in range(2))
    close(kernels.rms_norm(x, norm, ours), reference.rms_norm_reference(x, norm, theirs))
    close(ours, theirs)  # the interpreter truncates where hardware rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_layer_norm(biased: bool, dtype: torch.dtype) -> None:
    """By torch's own, with a mean that is not near zero."""
    x = random(3, 100, dtype=dtype) + 3
    bias = random(100, dtype=dtype, seed=2) if biased else None
    norm = LayerNorm(random(100, dtype=dtype, seed=1), 1e-3, bias)
    ours, theirs = (random(3, 100, dtype=dtype, seed=3) for _ in range(2))
    want = torch.nn.functional.layer_norm(
        (x.float() + theirs.float()).to(dtype).float(), (100,), norm.weight.float(),
        None if bias is None else bias.float(), 1e-3,
    )  # fmt: skip
    close(kernels.rms_norm(x, norm, ours), want.to(dtype))
    close(reference.rms_norm_reference(x, norm, theirs), want.to(dtype))
    close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_activated(activation: str, dtype: torch.dtype) -> None:
    x = random(3, 1100, dtype=dtype) * 3
    want = activate(x.float(), activation).to(dtype)
    close(kernels.activated(x, activation), want)


@pytest.mark.parametrize(
    ("pairs", "by_head"),
    [(Pairs(neighbours=True), True), (Pairs(neighbours=True), False), (Pairs(turned=5), False)],
)
def test_pairs_of_values(pairs: Pairs, by_head: bool) -> None:
    """Each pair by hand, after a layer norm with weights of each head's own, if any."""
    heads, kv_heads, dim, turned = 5, 2, 14, 7 if pairs.turned is None else pairs.turned
    qkv, angles = random(1, (heads + 2 * kv_heads) * dim), torch.linspace(0.3, 2.9, 7)
    angles[turned:] = 0
    table = torch.cat((angles.cos(), angles.sin()))[None].to(DEVICE)
    norms = None
    values = qkv.view(-1, dim).double().cpu()
    if by_head:
        weights = [random(count, dim, seed=count) for count in (heads, kv_heads)]
        norms = tuple(LayerNorm(each, 1e-2) for each in weights)
        normed = torch.nn.functional.layer_norm(values[: heads + kv_heads], (dim,), eps=1e-2)
        values[: heads + kv_heads] = normed * torch.cat(weights).double().cpu()
    want = values.clone()
    for head in range(heads + kv_heads):
        for pair in range(turned):
            low, high = (2 * pair, 2 * pair + 1) if pairs.neighbours else (pair, pair + turned)
            point = torch.complex(values[head, low], values[head, high])
            point = point * torch.polar(torch.ones(()), angles[pair])
            want[head, low], want[head, high] = point.real, point.imag
    step = RotaryStep(ints(0), ints(2))
    for rotary in (kernels.rotary, reference.rotary_reference):
        cache = torch.zeros(1, 2 * kv_heads, 4, dim, device=DEVICE)
        queries = rotary(qkv, cache, step, table, norms, pairs=pairs)
        close(queries[0], want[:heads].float().to(DEVICE))
        close(cache[0, :, 2], want[heads:].float().to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "normed", "rotated"),
    [
        (4, 2, 64, False, True),
        (5, 1, 80, False, True),
        (4, 4, 96, True, True),
        (2, 1, 256, True, True),
        (5, 1, 80, False, False),
    ],
)
def test_rotary_writes_the_cache(
    heads: int, kv_heads: int, dim: int, normed: bool, rotated: bool, dtype: torch.dtype
) -> None:
    qkv = random(4, (heads + 2 * kv_heads) * dim, dtype=dtype)
    slots = torch.tensor([37, 0, -1, 63], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([5, 0, 9, 31], dtype=torch.int32, device=DEVICE)
    step = RotaryStep(positions, slots)
    angles = torch.outer(torch.arange(32.0), 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    table = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE) if rotated else None
    gains = (random(dim, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = tuple(RmsNorm(gain, 1e-6) for gain in gains) if normed else None
    caches = [torch.full((4, 2 * kv_heads, 16, dim), 9.0, dtype=dtype, device=DEVICE) for _ in "ab"]
    queries = [
        f(qkv, cache, step, table, norms)
        for f, cache in zip((kernels.rotary, reference.rotary_reference), caches, strict=True)
    ]
    close(*queries)
    close(*caches)
    assert (caches[0][2] == 9).sum() == 2 * kv_heads * dim * 15  # one token of block 2 was written


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page", "normed"), [(4, 2, 64, 16, False), (5, 3, 12, 6, True)]
)
def test_rotary_writes_codes(
    heads: int, kv_heads: int, dim: int, page: int, normed: bool, *, dtype: torch.dtype, kind: str
) -> None:
    """The codes and scales of the formula (a reference in torch, and value by value)."""
    qkv = random(5, (heads + 2 * kv_heads) * dim, dtype=dtype)
    qkv[1] = 0.0
    qkv[2, -dim:] *= 0.001
    slots = ints(2 * page + 1, 0, -1, 3 * page - 1, page)
    step = RotaryStep(ints(5, 0, 9, 31, 2), slots)
    angles = torch.outer(torch.arange(32.0), 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    table = torch.cat((angles.cos(), angles.sin()), 1).to(DEVICE)
    gains = (random(dim, dtype=dtype, seed=seed) for seed in (2, 3))
    norms = tuple(RmsNorm(gain, 1e-6) for gain in gains) if normed else None
    caches = []
    for write in (kernels.rotary, reference.rotary_reference):
        rows = torch.full((3, 2 * kv_heads, page * (dim + 2)), 77, dtype=torch.uint8, device=DEVICE)
        codes = rows[..., : page * dim].unflatten(-1, (page, dim))
        codes = codes.view(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        scales = rows[..., page * dim :].view(torch.bfloat16)
        write(qkv, codes, step, table, norms, scales)
        caches.append((rows, codes.float() * scales.float()[..., None], codes))
    (ours, read, codes), (theirs, expected, _) = caches
    close(read, expected)
    # The values that are not rotated or normed differ in no bit.
    assert torch.equal(ours[:, kv_heads:], theirs[:, kv_heads:])
    values = qkv[0].view(-1, dim)[heads + kv_heads :].float().cpu()
    assert torch.equal(read[2, kv_heads:, 1].cpu(), rounded_heads(values, kind))
    assert (codes.view(torch.uint8)[2] == 77).sum() >= 2 * kv_heads * dim * (page - 2)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_codes_of_a_head_that_is_not_finite(kind: torch.dtype) -> None:
    qkv = random(1, 6 * 8)
    qkv[0, 17], qkv[0, 40] = (
        float("inf"),
        float("nan"),
    )  # in the first key head, the last value head
    cache = torch.zeros(1, 4, 4, 8, device=DEVICE).to(kind)
    scales = torch.zeros(1, 4, 4, dtype=torch.bfloat16, device=DEVICE)
    kernels.rotary(qkv, cache, RotaryStep(ints(0), ints(2)), None, None, scales)
    assert scales[0, :, 2].isnan().tolist() == [True, False, False, True]
    assert not cache.float()[0, [0, 3]].any() and cache.float()[0, [1, 2], 2].all()


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_ties_and_subnormal_codes(kind: torch.dtype) -> None:
    """Half of a code's distance goes to the even one, as torch rounds."""
    greatest = 127.0 if kind == torch.int8 else 448.0
    sizes = torch.arange(0, 127.5, 0.5) if kind == torch.int8 else torch.arange(0, 16) / 1024
    if kind == torch.float8_e4m3fn:
        every = torch.arange(127, dtype=torch.uint8).view(kind).float()
        sizes = torch.cat((sizes, every, (every[1:] + every[:-1]) / 2))
    values = torch.cat((sizes, -sizes, sizes[:1])).float()
    values = torch.nn.functional.pad(values, (0, -len(values) % 62)).view(-1, 62)
    heads = torch.cat((values, torch.full((len(values), 2), greatest)), 1).to(DEVICE)
    count = len(heads)
    cache = torch.zeros(1, 2 * count, 1, 64, device=DEVICE).to(kind)
    scales = torch.zeros(1, 2 * count, 1, dtype=torch.bfloat16, device=DEVICE)
    qkv = torch.cat((heads[:1], heads, heads)).view(1, -1)
    kernels.rotary(qkv, cache, RotaryStep(ints(0), ints(0)), None, None, scales)
    assert (scales == 1).all()
    expected = heads.round() if kind == torch.int8 else heads.to(kind).float()
    assert torch.equal(cache.float()[0, :count, 0], expected)
    assert torch.equal(cache.float()[0, count:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("width", [48, 1500])
def test_gated(width: int, gelu: bool, dtype: torch.dtype) -> None:
    x = random(3, 2 * width, dtype=dtype) * 3
    close(kernels.gated(x, gelu), reference.gated_reference(x, gelu))
