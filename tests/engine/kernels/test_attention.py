"""Paged attention: the kernel (interpreted on a CPU, real on a GPU) against plain torch, and plain
torch against torch's own attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.kernels.attention_reference import AttentionStep, paged_attention_reference
from engine.model_spec import AttentionShape

from .device import DEVICE, close

attention_launch = pytest.importorskip("engine.kernels.attention_launch")


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
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    step, blocks = make_step(queries, contexts, page, generator)
    layout = (blocks, 2 * heads[1], page, dim)  # K and V of a block side by side, as in the arena
    cache = torch.randn(layout, generator=generator).to(DEVICE, dtype)
    q = torch.randn(sum(queries), heads[0], dim, generator=generator).to(DEVICE, dtype)
    shape = shape or AttentionShape(scale=dim**-0.5)
    chosen = attention_launch.Tiles(*tiles, 4, 2) if tiles else None
    got = attention_launch.paged_attention(
        q, cache, step, shape,
        out=torch.full_like(q, float("nan")), splits=splits, tiles=chosen,
    )  # fmt: skip
    return got, paged_attention_reference(q, cache, step, shape)


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


def test_a_soft_cap() -> None:
    close(*run([1, 20], [33, 5], shape=AttentionShape(3.0, softcap=5.0)))
    close(*run([1, 20], [33, 5], shape=AttentionShape(3.0, window=8, softcap=5.0)))


@pytest.mark.parametrize("splits", [2, 8])
def test_splits_of_the_keys_including_empty_ones(splits: int) -> None:
    close(*run([1, 1, 1], [100, 0, 16], splits=splits))
    close(*run([1, 1], [100, 5], heads=(7, 1), dim=80, splits=splits))


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


@settings(max_examples=8)
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
            seed=data.draw(st.integers(0, 99)),
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


@pytest.mark.parametrize("splits", [1, 4])
def test_blocks_behind_the_window_are_not_read(splits: int) -> None:
    """They were given to another sequence, whose numbers may be anything."""
    generator = torch.Generator().manual_seed(3)
    queries, contexts, window = [1, 1, 9], [70, 20, 61], 21
    step, blocks = make_step(queries, contexts, 4, generator)
    cache = torch.randn((blocks, 4, 4, 16), generator=generator).to(DEVICE)
    q = torch.randn(sum(queries), 4, 16, generator=generator).to(DEVICE)
    shape = AttentionShape(0.25, window=window)
    want = paged_attention_reference(q, cache, step, shape)
    for row, context in zip(step.table_rows.tolist(), contexts, strict=True):
        unseen = max(0, context - window + 1) // 4
        cache[step.tables[row, :unseen].long()] = float("nan")
    got = attention_launch.paged_attention(
        q, cache, step, shape, splits=splits, tiles=attention_launch.Tiles(16, 16, 4, 2)
    )
    assert torch.isnan(cache).any()
    close(got, want)
