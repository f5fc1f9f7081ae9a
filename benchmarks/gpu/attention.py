"""Paged attention beside torch's flash attention, which has no pages to look up."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.sizes import Heads, LatentHeads, Sizes
from benchmarks.gpu.timing import median_ms
from engine.backends.gpu.attention_launch import Tiles, choose_splits, latent_group, paged_attention
from engine.backends.gpu.attention_reference import AttentionStep
from engine.model_spec import AttentionShape

PAGE = 16
_FULL = Heads()


def measure(ceilings: Ceilings, sizes: Sizes) -> None:
    for length in sizes.prefills:
        _prefill(length, sizes.heads)
    for sequences, keys in sizes.decodes:
        _decode(sequences, keys, sizes.heads, ceilings)


def measure_latent(ceilings: Ceilings, sizes: Sizes) -> None:
    for sequences, keys in sizes.latent_decodes:
        _decode_latent(sequences, keys, sizes.latent_heads, ceilings)


def tune() -> None:
    """Says how other tile sizes do; the best belong into `engine/backends/gpu/attention_launch.py`."""
    for queries, keys, candidates in (
        (8192, 8192, [(128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3),
                      (64, 64, 4, 5), (128, 32, 4, 5)]),
        (1, 2048, [(16, 64, 4, 3), (16, 64, 4, 5), (16, 32, 4, 5), (16, 128, 4, 3),
                   (16, 64, 2, 3), (16, 128, 8, 3)]),
    ):  # fmt: skip
        sequences = 64 if queries == 1 else 1
        kv, tables = _cache(sequences, keys, _FULL)
        q = _randn(sequences * queries, _FULL.queries, _FULL.dim)
        step = _step(tables, keys, queries)
        for tiles in (Tiles(*candidate) for candidate in candidates):
            try:
                ms = median_ms(
                    partial(paged_attention, q, kv, step, _shape(_FULL), tiles=tiles), 0.2
                )
            except Exception as error:  # too large for the device: the others may fit
                say(f"  {queries} queries {tiles}: {type(error).__name__}")
                continue
            say(f"  {queries} queries {tiles}: {ms:.4f} ms")


def _shape(heads: Heads) -> AttentionShape:
    return AttentionShape(heads.dim**-0.5)


def _randn(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def _cache(sequences: int, keys: int, heads: Heads) -> tuple[Tensor, Tensor]:
    """Keys and values in scattered pages, and the block tables."""
    pages = sequences * keys // PAGE
    data = _randn(pages, 2 * heads.keys, PAGE, heads.dim)
    tables = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    return data, tables


def _step(tables: Tensor, keys: int, queries: int) -> AttentionStep:
    sequences = tables.shape[0]
    rows = torch.arange(sequences, dtype=torch.int32, device="cuda")
    cu_q = torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * queries
    lens = torch.full_like(rows, keys)
    return AttentionStep(tables, rows, lens, cu_q, sequences if queries == 1 else 0)


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    def run() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def _prefill(length: int, heads: Heads) -> None:
    kv, tables = _cache(1, length, heads)
    q = _randn(length, heads.queries, heads.dim)
    step, shape = _step(tables, length, length), _shape(heads)
    ours = median_ms(lambda: paged_attention(q, kv, step, shape))
    theirs = _peer_ms(q.transpose(0, 1)[None], length, heads, causal=True)
    work = 2 * heads.queries * length**2 * heads.dim  # two products over half of the square
    figure(
        f"gpu_attention_prefill_{length}", work / ours / 1e9, "TFLOP/s",
        peer="torch flash SDPA", peer_value=work / theirs / 1e9, at_least=0.65, aim=0.9,
        settings={"heads": heads.queries, "kv_heads": heads.keys, "dim": heads.dim, "dtype": "bf16"},
    )  # fmt: skip


def _decode(sequences: int, keys: int, heads: Heads, ceilings: Ceilings) -> None:
    kv, tables = _cache(sequences, keys, heads)
    q = _randn(sequences, heads.queries, heads.dim)
    step, shape = _step(tables, keys, 1), _shape(heads)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    splits = choose_splits(sequences, heads.keys, keys, processors)
    ours = median_ms(lambda: paged_attention(q, kv, step, shape, splits=splits))
    theirs = _peer_ms(q[:, :, None], keys, heads, causal=False)
    moved = 2 * sequences * keys * heads.keys * heads.dim * 2
    figure(
        f"gpu_attention_decode_{sequences}x{keys}", moved / ours / 1e6, "GB/s",
        peer="torch flash SDPA", peer_value=moved / theirs / 1e6, at_least=0.95, aim=1.0,
        settings={"splits": splits, "share_of_copy": round(moved / ours * 1e3 / ceilings.copy, 3)},
    )  # fmt: skip


def _decode_latent(sequences: int, keys: int, heads: LatentHeads, ceilings: Ceilings) -> None:
    width = heads.latent + heads.rotated
    pages = sequences * keys // PAGE
    data = _randn(pages, 1, PAGE, width)
    tables = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    q = _randn(sequences, heads.queries, width)
    step, out = _step(tables, keys, 1), torch.empty_like(q)[..., : heads.latent]
    shape = AttentionShape(128**-0.5)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    programs = heads.queries // latent_group(heads.queries, codes=False)
    splits = choose_splits(sequences, programs, keys, processors)
    ms = median_ms(
        lambda: paged_attention(q, data, step, shape, rotated=heads.rotated, out=out, splits=splits)
    )
    moved = data.nbytes
    work = 2 * sequences * keys * heads.queries * (2 * heads.latent + heads.rotated)
    figure(
        f"gpu_latent_attention_decode_{sequences}x{keys}", moved / ms / 1e6, "GB/s",
        peer="measured copy bandwidth", peer_value=ceilings.copy / 1e9, at_least=0.3, aim=0.6,
        settings={"splits": splits, "heads": heads.queries, "tflops": round(work / ms / 1e9, 1)},
    )  # fmt: skip


def _peer_ms(q: Tensor, keys: int, heads: Heads, causal: bool) -> float:
    shape = (q.shape[0], heads.keys, keys, heads.dim)
    k, v = (torch.randn(shape, dtype=q.dtype, device="cuda") for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION if q.is_cuda else SDPBackend.MATH):
        return median_ms(_flash(q, k, v, causal))
