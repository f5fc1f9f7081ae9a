"""Paged attention: the kernel (interpreted on a CPU, real on a GPU) against plain torch, and plain
torch against torch's own attention."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.backends.gpu.attention_reference import AttentionStep, paged_attention_reference
from engine.backends.gpu.kv_launch import of_kernels
from engine.backends.gpu.mixed import Mix, MixLimits
from engine.backends.layers.alibi import alibi as made_alibi
from engine.model_spec import AlibiSpec, AttentionShape
from tests.engine.gpu.device import DEVICE, close

attention_launch = pytest.importorskip("engine.backends.gpu.attention_launch")
CODES = [torch.int8, torch.float8_e4m3fn]


def make_step(queries: list[int], contexts: list[int], page: int, generator: torch.Generator):
    lengths = [q + c for q, c in zip(queries, contexts, strict=True)]
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(needed) + 3, generator=generator).int()
    tables = torch.full((len(queries) + 2, max(needed) + 1), -7, dtype=torch.int32)
    table_rows = torch.randperm(len(tables), generator=generator)[: len(queries)].int()
    used = 0
    for i, n in enumerate(needed):
        tables[table_rows[i], :n] = order[used : used + n]
        used += n
    cu_q = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
    decodes = next((i for i, q in enumerate(queries) if q != 1), len(queries))
    lens = torch.tensor(lengths, dtype=torch.int32)
    step = AttentionStep(*(t.to(DEVICE) for t in (tables, table_rows, lens, cu_q)), decodes)
    return step, len(order)


def run(
    queries: list[int],
    contexts: list[int],
    heads: tuple[int, int] = (4, 2),
    dim: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    *,
    shape: AttentionShape | None = None,
    splits: int = 1,
    tiles: tuple[int, int] | None = (16, 16),
    seed: int = 0,
    codes: torch.dtype | None = None,
    sinks: bool = False,
    alibi: str = "",
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    step, blocks = make_step(queries, contexts, page, generator)
    layout = (blocks, 2 * heads[1], page, dim)  # K and V of a block side by side, as in the arena
    cache, scales = torch.randn(layout, generator=generator).to(DEVICE, dtype), None
    if codes is not None:
        cache, scales = random_codes(layout, codes, generator)
    q = torch.randn(sum(queries), heads[0], dim, generator=generator).to(DEVICE, dtype)
    shape = shape or AttentionShape(scale=dim**-0.5)
    beside: dict[str, Any] = {}
    if sinks:
        beside["sinks"] = (2 * torch.randn(heads[0], generator=generator)).to(DEVICE, dtype)
    if alibi:
        slopes = (torch.rand(heads[0], generator=generator) + 0.01).tolist()
        spec = AlibiSpec(tuple(slopes), rounded=alibi == "rounded")
        beside["alibi"] = made_alibi(spec, shape.scale, torch.device(DEVICE))
    chosen = attention_launch.Tiles(*tiles, 4, 2) if tiles else None
    got = attention_launch.paged_attention(
        q, cache, step, shape, scales=scales,
        out=torch.full_like(q, float("nan")), splits=splits, tiles=chosen, **beside,
    )  # fmt: skip
    return got, paged_attention_reference(q, cache, step, shape, scales, **beside)


def random_codes(
    layout: tuple[int, ...], kind: torch.dtype, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Any codes, and their scales behind them in each row, as the pool has them."""
    *front, page, dim = layout
    rows = torch.randint(0, 256, (*front, page * (dim + 2)), generator=generator).to(
        DEVICE, torch.uint8
    )
    codes = rows[..., : page * dim].unflatten(-1, (page, dim))
    if kind == torch.float8_e4m3fn:
        codes[codes % 128 == 127] = 0x7E  # the codes of no number; 0x7E is the greatest one, 448
    scales = rows[..., page * dim :].view(torch.bfloat16)
    greatest = 127 if kind == torch.int8 else 448
    scales.copy_((torch.rand(scales.shape, generator=generator) + 0.5) * 2 / greatest)
    return codes.view(kind), scales


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (14, 2), (8, 1)])
def test_groups_of_query_heads(heads: tuple[int, int]) -> None:
    close(*run([1, 1, 19], [40, 0, 3], heads))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(dim: int) -> None:
    close(*run([1, 6], [17, 9], dim=dim))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    close(*run([1, 9], [35, 4], dtype=dtype))


@pytest.mark.parametrize("window", [1, 7, 16, 40])
def test_a_sliding_window(window: int) -> None:
    shape = AttentionShape(0.1, window=window)
    close(*run([1, 1, 37, 3], [70, 2, 0, 30], shape=shape))
    close(*run([1, 1], [70, 2], shape=shape, splits=4))


@pytest.mark.parametrize("first", [1, 6, 16, 37])
@pytest.mark.parametrize("splits", [1, 4])
def test_first_keys_beside_a_window(splits: int, first: int) -> None:
    """Among them keys that the window's tiles have, too, and all of a sequence."""
    shape = AttentionShape(0.2, window=9, first=first, softcap=3.0 if first == 6 else 0.0)
    close(*run([1, 1, 1], [90, 2, 40], (6, 2), 14, 4, shape=shape, splits=splits, tiles=(16, 32)))
    codes = torch.int8 if first == 16 else None
    if splits == 1:
        close(*run([1, 37, 9], [70, 0, 51], shape=shape, codes=codes))
        close(
            *run([1, 20], [70, 33], shape=shape, sinks=True, alibi="" if first > 6 else "rounded")
        )


def test_a_soft_cap() -> None:
    close(*run([1, 20], [33, 5], shape=AttentionShape(3.0, softcap=5.0)))
    close(*run([1, 20], [33, 5], shape=AttentionShape(3.0, window=8, softcap=5.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [1, 4])
def test_sinks(splits: int, dtype: torch.dtype) -> None:
    """Also of a head count that fills no block of rows, over codes, and behind a window and a cap."""
    close(*run([1, 1, 1], [100, 0, 16], (6, 2), 14, splits=splits, sinks=True, dtype=dtype))
    shape = AttentionShape(0.3, window=11, softcap=4.0)
    close(*run([1, 1], [70, 2], (14, 2), 20, 4, splits=splits, sinks=True, shape=shape))
    if splits == 1:
        close(*run([1, 9, 37], [35, 4, 0], (3, 1), 24, dtype=dtype, sinks=True))
        close(*run([1, 9, 37], [35, 4, 20], shape=shape, sinks=True, codes=torch.int8))


def test_a_sink_takes_its_share_of_the_weight() -> None:
    """By hand: with one key, whose score is 0, the output is its value over 1 + e^sink."""
    tables = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    ints = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    step = AttentionStep(tables, ints[:1], ints[1:], ints, 1)
    cache = torch.ones(1, 2, 16, 16, device=DEVICE)
    q = torch.zeros(1, 3, 16, device=DEVICE)
    sinks = torch.tensor([0.0, 2.0, float("-inf")], device=DEVICE)
    got = attention_launch.paged_attention(q, cache, step, AttentionShape(1.0), sinks=sinks)
    expected = 1 / (1 + sinks.exp())
    torch.testing.assert_close(got[0], expected[:, None].expand(3, 16))


@pytest.mark.parametrize("alibi", ["plain", "rounded"])
@pytest.mark.parametrize("splits", [1, 4])
def test_linear_biases(splits: int, alibi: str) -> None:
    """Positions above 256, which bfloat16 rounds; with a cap, a window and codes too."""
    close(*run([1, 1, 1], [400, 0, 16], (6, 2), 14, splits=splits, alibi=alibi))
    shape = AttentionShape(0.3, window=11, softcap=4.0)
    close(*run([1, 1], [70, 2], (5, 1), 20, 4, splits=splits, alibi=alibi, shape=shape))
    if splits == 1:
        close(*run([1, 9, 37], [35, 4, 280], (3, 3), 24, alibi=alibi, dtype=torch.bfloat16))
        close(*run([1, 9, 37], [35, 4, 20], alibi=alibi, codes=torch.int8))


@pytest.mark.parametrize("rounded", [False, True])
def test_linear_biases_by_hand(rounded: bool) -> None:
    """Two keys whose products are 0, at positions 300 and 301: the weights are those of the biases.
    Of bfloat16 both positions are 300 (they are 2 apart), whose product with 0.7 is 210."""
    tables = torch.arange(19, dtype=torch.int32, device=DEVICE)[None]
    ints = torch.tensor([0, 1, 302], dtype=torch.int32, device=DEVICE)
    step = AttentionStep(tables, ints[:1], ints[2:], ints[:2], 1)
    cache = torch.zeros(19, 2, 16, 16, device=DEVICE)
    cache[18, 1, 12], cache[18, 1, 13] = 1.0, 2.0
    biases = made_alibi(AlibiSpec((0.7,), rounded), 0.5, torch.device(DEVICE))
    got = attention_launch.paged_attention(
        torch.zeros(1, 1, 16, device=DEVICE),
        cache,
        step,
        AttentionShape(0.5, window=2),
        alibi=biases,
    )
    first = 0.5 if rounded else 1 / (1 + math.exp(0.7))
    torch.testing.assert_close(got, torch.full_like(got, first + 2 * (1 - first)))


@pytest.mark.parametrize("splits", [2, 8])
def test_splits_of_the_keys_including_empty_ones(splits: int) -> None:
    close(*run([1, 1, 1], [100, 0, 16], splits=splits))
    close(*run([1, 1], [100, 5], heads=(7, 1), dim=80, splits=splits))


@pytest.mark.parametrize("window", [0, 300])
def test_a_short_sequence_uses_few_splits_beside_a_long_one(window: int) -> None:
    """Of a launch for any length: one of at most 128 keys writes its output at once."""
    generator = torch.Generator().manual_seed(2)
    step, blocks = make_step([1] * 4, [0, 100, 299, 650], 16, generator)
    cache = torch.randn((blocks, 4, 16, 32), generator=generator).to(DEVICE)
    q = torch.randn(4, 4, 32, generator=generator).to(DEVICE)
    shape = AttentionShape(0.2, window=window)
    partials = attention_launch.Partials.make(4 * 4 * 8, 32, torch.device(DEVICE))
    for each in (partials.acc, partials.peak, partials.total):
        each.fill_(float("nan"))
    got = attention_launch.paged_attention(
        q, cache, step, shape, partials=partials, splits=8,
        tiles=attention_launch.Tiles(16, 16, 4, 2),
    )  # fmt: skip
    close(got, paged_attention_reference(q, cache, step, shape))
    written = partials.peak.view(4, 4, 8).isfinite()
    assert (written == written[:, :1]).all()
    # Of 128 keys each; the window leaves 300, rounded up to whole tiles.
    assert written[:, 0].sum(-1).tolist() == [0, 0, 3, 3 if window else 6]


@pytest.mark.parametrize("page", [16, 32, 48])
def test_pages_of_other_sizes(page: int) -> None:
    close(*run([1, 11], [90, 50], page=page, tiles=(16, 32)))


def test_the_tiles_that_it_chooses_itself() -> None:
    close(*run([1, 40], [90, 30], tiles=None))
    close(*run([1, 40], [90, 30], dtype=torch.bfloat16, tiles=None, splits=2))


def test_sequences_without_a_query_are_passed_over() -> None:
    """A graph is padded with them; their tables and lengths hold nothing of use."""
    generator = torch.Generator().manual_seed(1)
    step, blocks = make_step([1, 1], [20, 3], 16, generator)
    cu_q = torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=DEVICE)
    rows = torch.cat((step.table_rows[:1], step.table_rows.new_full((2,), 10**6)))
    lens = torch.tensor([21, 999, 999], dtype=torch.int32, device=DEVICE)
    padded = AttentionStep(step.tables, rows, lens, cu_q, 3)
    cache = torch.randn((blocks, 4, 16, 64), generator=generator).to(DEVICE)
    q = torch.randn(3, 4, 64, generator=generator).to(DEVICE)
    shape = AttentionShape(0.125)
    want = paged_attention_reference(q, cache, padded, shape)
    assert not want[1:].any()
    for splits in (1, 2):
        out = torch.full_like(q, float("nan"))
        launch = attention_launch.paged_attention
        close(launch(q, cache, padded, shape, out=out, splits=splits), want)


@pytest.mark.parametrize("splits", [1, 4])
def test_any_mix_of_a_graph(splits: int) -> None:
    """The launches of one graph over mixes that lie in memory; padding is not written."""
    limits = MixLimits(splits=8, programs=12, combined=3, chunks=4)
    mixes = [([1, 1, 1, 20], [140, 0, 300, 5]), ([2, 9, 3], [70, 0, 260]), ([1, 40], [400, 12])]
    partials = attention_launch.Partials.make(4 * limits.programs, 32, torch.device(DEVICE))
    for queries, contexts in mixes:
        generator = torch.Generator().manual_seed(len(queries))
        step, blocks = make_step(queries, contexts, 16, generator)
        padding, tokens = 6 - len(queries), sum(queries)
        counts = torch.tensor([step.decodes, len(queries), splits], dtype=torch.int32)
        padded = AttentionStep(
            step.tables,
            torch.cat((step.table_rows, step.table_rows.new_full((padding,), 10**6))),
            torch.cat((step.seq_lens, step.seq_lens.new_full((padding,), 999))),
            torch.cat((step.cu_q, step.cu_q[-1:].expand(padding))),
            0,
            Mix(counts.to(DEVICE), limits),
        )
        cache = torch.randn((blocks, 4, 16, 32), generator=generator).to(DEVICE)
        q = torch.randn(48, 4, 32, generator=generator).to(DEVICE)
        shape = AttentionShape(0.2, window=150 if len(queries) == 3 else 0)
        out = torch.full_like(q, float("nan"))
        for each in (partials.acc, partials.peak, partials.total):
            each.fill_(float("nan"))
        attention_launch.paged_attention(
            q, cache, padded, shape, out=out, partials=partials, splits=limits.splits,
            tiles=attention_launch.Tiles(16, 16, 4, 2),
        )  # fmt: skip
        close(out[:tokens], paged_attention_reference(q, cache, step, shape)[:tokens])
        assert out[tokens:].isnan().all()


def test_the_limits_of_a_graph_cover_every_mix() -> None:
    for kv_heads, processors, most in ((8, 132, 64), (1, 4, 8), (2, 16, 300), (32, 132, 5)):
        limits = attention_launch.mix_limits(256, most, kv_heads, 8192, processors)
        for n in range(1, most + 1):
            splits = attention_launch.choose_splits(n, kv_heads, 8192, processors)
            assert splits <= limits.splits
            assert n * splits <= limits.programs
            assert splits == 1 or n <= limits.combined
        partials = attention_launch.max_partials(most, kv_heads, kv_heads, processors)
        assert limits.programs * kv_heads <= partials


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "page"), [((4, 2), 64, 16), ((14, 2), 12, 4), ((3, 3), 80, 6), ((8, 1), 40, 3)]
)
def test_codes_of_any_size(heads: tuple[int, int], dim: int, page: int, codes: torch.dtype) -> None:
    close(*run([1, 1, 19], [40, 0, 3], heads, dim, page, codes=codes))
    close(*run([1, 1], [70, 5], heads, dim, page, splits=4, codes=codes))


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_beside_queries_in_16_bits(codes: torch.dtype, dtype: torch.dtype) -> None:
    shape = AttentionShape(0.1, window=30, softcap=20.0)
    close(*run([1, 9], [35, 4], dtype=dtype, codes=codes))
    close(*run([1, 33], [90, 20], dtype=dtype, codes=codes, tiles=None, shape=shape))


def test_every_code_of_e4m3_is_read_as_torch_reads_it() -> None:
    """One key, so that the output is its value: subnormal codes and both zeros too."""
    q = torch.ones(2, 1, 128, device=DEVICE)
    every = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    every[every % 128 == 127] = 0
    cache = torch.zeros(2, 2, 16, 128, dtype=torch.uint8, device=DEVICE)
    cache[:, 1, 0] = every.view(2, 128)
    tables = torch.tensor([[0], [1]], dtype=torch.int32, device=DEVICE)
    ones = torch.ones(2, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(3, dtype=torch.int32, device=DEVICE)
    step = AttentionStep(tables, starts[:2], ones, starts, 2)
    scales = torch.full((2, 2, 16), 0.5, dtype=torch.bfloat16, device=DEVICE)
    got = attention_launch.paged_attention(
        q, cache.view(torch.float8_e4m3fn), step, AttentionShape(1.0), scales=scales
    )
    assert torch.equal(got.view(256), every.view(torch.float8_e4m3fn).float() * 0.5)


def test_other_codes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv is torch.uint8 with scales of torch.bfloat16"):
        of_kernels(torch.zeros(1, 2, 4, 8, dtype=torch.uint8), torch.zeros(1, 2, 4).bfloat16())


@settings(max_examples=12)
@given(data=st.data())
def test_any_mix_of_sequences(data: st.DataObject) -> None:
    decodes = data.draw(st.integers(0, 3))
    chunks = data.draw(st.lists(st.integers(1, 40), min_size=1 - min(decodes, 1), max_size=3))
    queries = [1] * decodes + chunks
    contexts = [data.draw(st.integers(0, 70)) for _ in queries]
    close(
        *run(
            queries, contexts, heads=data.draw(st.sampled_from([(2, 2), (6, 2), (4, 1)])), dim=16,
            splits=data.draw(st.sampled_from([1, 4])),
            tiles=(16, data.draw(st.sampled_from([16, 32]))),
            shape=AttentionShape(0.2, window=data.draw(st.sampled_from([0, 0, 9, 33]))),
            seed=data.draw(st.integers(0, 99)), codes=data.draw(st.sampled_from([None, *CODES])),
            sinks=data.draw(st.booleans()),
        )
    )  # fmt: skip


@pytest.mark.parametrize("group", [1, 3])
def test_the_reference_equals_torch(group: int) -> None:
    generator = torch.Generator().manual_seed(3)
    step, blocks = make_step([12], [0], 16, generator)
    cache = torch.randn((blocks, 4, 16, 32), generator=generator).to(DEVICE)
    q = torch.randn(12, 2 * group, 32, generator=generator).to(DEVICE)
    got = paged_attention_reference(q, cache, step, AttentionShape(32**-0.5))
    block = cache[step.tables[step.table_rows[0], 0].long()]
    k, v = (half[:, :12].repeat_interleave(group, 0)[None] for half in block.chunk(2))
    want = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k, v, is_causal=True
    )
    close(got, want[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("sequences", "heads", "most", "expected"),
    [(1, 8, 8192, 32), (32, 8, 8192, 1), (4, 8, 8192, 8), (1, 8, 200, 1), (1, 8, 300, 2)],
)
def test_the_number_of_splits(sequences: int, heads: int, most: int, expected: int) -> None:
    assert attention_launch.choose_splits(sequences, heads, most, 132) == expected


@pytest.mark.parametrize("codes", [None, *CODES], ids=str)
@pytest.mark.parametrize(("splits", "first"), [(1, 0), (4, 0), (1, 6), (4, 6)])
def test_blocks_behind_the_window_are_not_read(
    splits: int, first: int, codes: torch.dtype | None
) -> None:
    """They were given to another sequence, whose numbers may be anything."""
    generator = torch.Generator().manual_seed(3)
    queries, contexts, window = [1, 1, 9], [70, 20, 61], 21
    step, blocks = make_step(queries, contexts, 4, generator)
    cache, scales = torch.randn((blocks, 4, 4, 16), generator=generator).to(DEVICE), None
    if codes is not None:
        cache, scales = random_codes((blocks, 4, 4, 16), codes, generator)
    q = torch.randn(sum(queries), 4, 16, generator=generator).to(DEVICE)
    shape = AttentionShape(0.25, window=window, first=first)
    want = paged_attention_reference(q, cache, step, shape, scales)
    spoilt = cache if scales is None else scales
    for row, context in zip(step.table_rows.tolist(), contexts, strict=True):
        unseen = max(0, context - window + 1) // 4
        spoilt[step.tables[row, -(-first // 4) : unseen].long()] = float("nan")
    got = attention_launch.paged_attention(
        q, cache, step, shape, scales=scales, splits=splits,
        tiles=attention_launch.Tiles(16, 16, 4, 2),
    )  # fmt: skip
    assert torch.isnan(spoilt).any()
    close(got, want)
