"""Norms, rotations and attention of few rows by the compiled kernel, against formulas in float64."""

import random
from types import SimpleNamespace

import pytest
import torch

from engine.backends.compiled.pointwise import greatest_ids, is_compiled, normed, place_
from engine.backends.cpu.attention_tile import attend_tile, can_attend
from engine.backends.layers.attention_plan import plan_tiles
from engine.backends.layers.kv import KvPool
from engine.backends.layers.operations import Attention
from engine.backends.layers.quantised_kv import make_pool
from engine.batch import Row
from engine.config import EngineConfig
from engine.model_spec import AttentionShape, Sight
from engine.protocol import SamplingParams

DTYPES = (torch.float32, torch.bfloat16)
BLOCKS, LAYERS = 64, 2


def within(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Rounded once, to the type of what was found."""
    limit = 2e-6 if found.dtype is torch.float32 else 2**-8
    error = (found.double() - exact).abs()
    return bool((error <= limit * exact.abs().clamp(min=1.0)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 40, 576])
def test_norms(level: str, dtype: torch.dtype, width: int) -> None:
    draw = torch.Generator().manual_seed(width)
    x = (3 * torch.randn(5, 2 * width, generator=draw)).to(dtype)[:, :width]
    weight = torch.randn(width, generator=draw)
    assert is_compiled(x)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert within(normed(x, weight, 1e-5), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotations_and_what_is_stored(level: str, dtype: torch.dtype) -> None:
    heads, kv_heads, dim, rows = 4, 2, 24, 3
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=draw).to(dtype)
    rotated = heads + kv_heads
    cos, sin = (torch.randn(rows, rotated * dim, generator=draw).to(dtype) for _ in range(2))
    pool = torch.zeros(40, dim, dtype=dtype)
    slots = torch.tensor(random.Random(1).sample(range(40), rows * 2 * kv_heads)).view(rows, -1)
    given = x.double().view(rows, -1, dim)
    other = given[:, :rotated].roll(dim // 2, -1)
    angles = [each.double().view(rows, rotated, dim) for each in (cos, sin)]
    exact = torch.cat((given[:, :rotated] * angles[0] + other * angles[1], given[:, rotated:]), 1)
    place_(x, (cos, sin), pool, slots, (rotated, heads, 2 * kv_heads))
    assert within(x.view(rows, -1, dim), exact)
    assert torch.equal(pool[slots], x.view(rows, -1, dim)[:, heads:])
    untouched = sorted(set(range(40)) - set(slots.flatten().tolist()))
    assert not pool[untouched].any()


def make(
    dtype: torch.dtype, kv_dtype: str = "auto", size: int = 16, heads: int = 6, dim: int = 24
) -> KvPool:
    spec = SimpleNamespace(
        layers=LAYERS,
        cached_layers=LAYERS,
        kv_heads=2,
        cached_heads=4,
        heads=heads,
        head_dim=dim,
        alibi=None,
    )
    config = EngineConfig(model="fake", block_size=size, kv_dtype=kv_dtype)
    return make_pool(config, spec, BLOCKS, dtype, torch.device("cpu"))  # type: ignore[arg-type]


def rows_of(lengths: list[int], size: int) -> list[Row]:
    """Sequences in blocks of the pool in any order."""
    free = random.Random(2).sample(range(BLOCKS), BLOCKS)
    params = SamplingParams(max_tokens=1)
    found = []
    for number, length in enumerate(lengths):
        blocks = [free.pop() for _ in range(-(-length // size))]
        found.append(
            Row(number, [1], length - 1, blocks, None, True, params, 0, [], prompt_len=1)
        )  # fmt: skip
    return found


def exact_attention(
    q: torch.Tensor,
    pool: KvPool,
    rows: list[Row],
    shape: AttentionShape,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    out = []
    for query, row in zip(q.double(), rows, strict=True):
        end = row.start + 1
        begin = max(0, end - shape.window) if shape.window else 0
        found = pool.data[row.blocks, 1].double().transpose(0, 1).flatten(1, 2)[:, begin:end]
        keys, values = found.repeat_interleave(pool.group, 0).chunk(2)
        scores = (keys @ query[:, :, None])[..., 0] * shape.scale
        if shape.softcap:
            scores = torch.tanh(scores / shape.softcap) * shape.softcap
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), -1)
        weights = scores.softmax(-1)[:, : end - begin]
        out.append((weights[:, None] @ values)[:, 0].flatten())
    return torch.stack(out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 16, 32])
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(0, 0, 0), (20, 0, 1), (0, 4.0, 1)])
def test_attention_where_keys_and_values_lie(
    level: str, dtype: torch.dtype, size: int, window: int, softcap: float, sinks: bool
) -> None:
    pool, lengths = make(dtype, size=size), [1, 16, 17, 100, 190, 33]
    pool.data.normal_(generator=torch.Generator().manual_seed(3))
    rows = rows_of(lengths, size)
    q = torch.randn(6, 6, 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    sink = torch.randn(6).to(dtype) if sinks else None
    shape = AttentionShape(0.2, window, softcap)
    attention = Attention(1, 1, shape, None, None, None, sinks=sink)
    found = torch.zeros(6, 6 * 24, dtype=dtype)
    for tile in plan_tiles(rows, [], Sight(window), pool):
        assert can_attend(tile, pool, attention)
        found[tile.rows] = attend_tile(q[tile.rows], pool, tile, attention)
    assert within(found, exact_attention(q, pool, rows, shape, sink))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [24, 64, 96, 128])
@pytest.mark.parametrize(("heads", "window"), [(2, 0), (8, 40), (12, 0)])
def test_few_and_many_heads_of_any_width(
    level: str, dtype: torch.dtype, dim: int, heads: int, window: int
) -> None:
    """Up to four heads of bfloat16 read keys and values where they lie, more read them widened."""
    pool, lengths = make(dtype, heads=heads, dim=dim), [1, 15, 16, 47, 150]
    pool.data.normal_(generator=torch.Generator().manual_seed(3))
    rows, shape = rows_of(lengths, 16), AttentionShape(dim**-0.5, window)
    draw = torch.Generator().manual_seed(4)
    q = torch.randn(len(rows), heads, dim, generator=draw).to(dtype)
    attention = Attention(1, 1, shape, None, None, None)
    found = torch.zeros(len(rows), heads * dim, dtype=dtype)
    for tile in plan_tiles(rows, [], Sight(window), pool):
        found[tile.rows] = attend_tile(q[tile.rows], pool, tile, attention)
    assert within(found, exact_attention(q, pool, rows, shape, None))


@pytest.mark.parametrize("dim", [24, 64])
def test_nothing_beyond_the_sequence_is_read(level: str, dim: int) -> None:
    pool, rows = make(torch.float32, dim=dim), rows_of([12, 20], 16)
    pool.data.normal_()
    q = torch.randn(2, 6, dim)
    shape = AttentionShape(0.2)
    exact = exact_attention(q, pool, rows, shape, None)
    free = sorted(set(range(BLOCKS)) - {block for row in rows for block in row.blocks})
    pool.data[free] = float("nan")
    pool.data[rows[0].blocks[0], :, :, 12:] = float("inf")
    pool.data[rows[1].blocks[1], :, :, 4:] = float("nan")
    attention = Attention(1, 1, shape, None, None, None)
    (tile,) = plan_tiles(rows, [], Sight(), pool)
    assert within(attend_tile(q, pool, tile, attention), exact)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_keys_and_values_in_eight_bits(kv_dtype: str) -> None:
    pool, rows = make(torch.float32, kv_dtype), rows_of([25, 40], 16)
    for row in rows:
        slots = torch.tensor([b * 16 + n for b in row.blocks for n in range(16)])
        first = slots // 16 * (LAYERS * 4)
        at = (first[:, None] + torch.arange(4)) * 16 + (slots % 16)[:, None]
        pool.write(1, at, torch.randn(len(slots), 4, 24))
    plain = make(torch.float32)
    every = torch.arange(BLOCKS * LAYERS * 4 - 4)
    plain.rows[1][: len(every)] = pool.gather(1, every)
    q, shape = torch.randn(2, 6, 24), AttentionShape(0.2)
    attention = Attention(1, 1, shape, None, None, None)
    (tile,) = plan_tiles(rows, [], Sight(), pool)
    exact = exact_attention(q, plain, rows, shape, None)
    assert within(attend_tile(q, pool, tile, attention), exact)


@pytest.mark.parametrize("vocab", [7, 512, 2048, 1050])
def test_the_greatest_logit_is_the_first_one(level: str, vocab: int) -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randint(-9, 10, (40, vocab + 5), generator=draw).float()[:, :vocab]
    logits[:20] = torch.randn(20, vocab, generator=draw)
    logits[5, : vocab // 2] = float("-inf")
    expected = logits.argmax(-1)
    for row, (at, value) in enumerate(
        [(0, "nan"), (vocab - 1, "nan"), (0, "inf"), (vocab - 1, "inf")]
    ):
        logits[row, at] = float(value)
        expected[row] = -1
    logits[4], expected[4] = float("-inf"), -1
    assert greatest_ids(logits).tolist() == expected.tolist()
