"""Paged attention beside torch's flash attention, which has no pages to look up."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.figures import figure, say
from benchmarks.gpu.timing import median_ms
from engine.kernels.attention_launch import Tiles, choose_splits, latent_group, paged_attention
from engine.kernels.attention_reference import AttentionStep
from engine.model_spec import AttentionShape

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
LATENT_HEADS, LATENT, ROTATED = 128, 512, 64
SHAPE = AttentionShape(DIM**-0.5)


def measure(ceilings: Ceilings) -> None:
    for length in (2048, 8192):
        _prefill(length)
    for sequences, keys in ((64, 2048), (8, 8192), (1, 8192)):
        _decode(sequences, keys, ceilings)


def measure_latent(ceilings: Ceilings) -> None:
    """At DeepSeek V3's size: all heads read one vector of a position, as key and as value."""
    for sequences, keys in ((64, 4096), (8, 8192), (1, 8192)):
        _decode_latent(sequences, keys, ceilings)


def tune() -> None:
    """Says how other tile sizes do; the best belong into `engine/kernels/attention_launch.py`."""
    for queries, keys, candidates in (
        (8192, 8192, [(128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 64, 4, 3),
                      (64, 64, 4, 5), (128, 32, 4, 5)]),
        (1, 2048, [(16, 64, 4, 3), (16, 64, 4, 5), (16, 32, 4, 5), (16, 128, 4, 3),
                   (16, 64, 2, 3), (16, 128, 8, 3)]),
    ):  # fmt: skip
        sequences = 64 if queries == 1 else 1
        kv, tables = _cache(sequences, keys)
        q = torch.randn(sequences * queries, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        step = _step(tables, keys, queries)
        for tiles in (Tiles(*candidate) for candidate in candidates):
            try:
                ms = median_ms(partial(paged_attention, q, kv, step, SHAPE, tiles=tiles), 0.2)
            except Exception as error:  # too large for the device: the others may fit
                say(f"  {queries} queries {tiles}: {type(error).__name__}")
                continue
            say(f"  {queries} queries {tiles}: {ms:.4f} ms")


def _cache(sequences: int, keys: int) -> tuple[Tensor, Tensor]:
    """Keys and values in scattered pages, and the block tables."""
    pages = sequences * keys // PAGE
    data = torch.randn(pages, 2 * KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device="cuda")
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


def _prefill(length: int) -> None:
    kv, tables = _cache(1, length)
    q = torch.randn(length, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    step = _step(tables, length, length)
    ours = median_ms(lambda: paged_attention(q, kv, step, SHAPE))
    theirs = _peer_ms(q.transpose(0, 1)[None], length, causal=True)
    work = 2 * HEADS * length**2 * DIM  # two products over half of the square
    figure(
        f"gpu_attention_prefill_{length}", work / ours / 1e9, "TFLOP/s",
        peer="torch flash SDPA", peer_value=work / theirs / 1e9, at_least=0.65, aim=0.9,
        settings={"heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "dtype": "bf16"},
    )  # fmt: skip


def _decode(sequences: int, keys: int, ceilings: Ceilings) -> None:
    kv, tables = _cache(sequences, keys)
    q = torch.randn(sequences, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    step = _step(tables, keys, 1)
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    splits = choose_splits(sequences, KV_HEADS, keys, processors)
    ours = median_ms(lambda: paged_attention(q, kv, step, SHAPE, splits=splits))
    theirs = _peer_ms(q[:, :, None], keys, causal=False)
    moved = 2 * sequences * keys * KV_HEADS * DIM * 2
    figure(
        f"gpu_attention_decode_{sequences}x{keys}", moved / ours / 1e6, "GB/s",
        peer="torch flash SDPA", peer_value=moved / theirs / 1e6, at_least=0.95, aim=1.0,
        settings={"splits": splits, "share_of_copy": round(moved / ours * 1e3 / ceilings.copy, 3)},
    )  # fmt: skip


def _decode_latent(sequences: int, keys: int, ceilings: Ceilings) -> None:
    pages = sequences * keys // PAGE
    data = torch.randn(pages, 1, PAGE, LATENT + ROTATED, dtype=torch.bfloat16, device="cuda")
    tables = torch.randperm(pages, device="cuda").int().view(sequences, -1)
    q = torch.randn(sequences, LATENT_HEADS, LATENT + ROTATED, dtype=torch.bfloat16, device="cuda")
    step, out = _step(tables, keys, 1), torch.empty_like(q)[..., :LATENT]
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    programs = LATENT_HEADS // latent_group(LATENT_HEADS, codes=False)
    splits = choose_splits(sequences, programs, keys, processors)
    ms = median_ms(
        lambda: paged_attention(q, data, step, SHAPE, rotated=ROTATED, out=out, splits=splits)
    )
    moved = data.nbytes
    work = 2 * sequences * keys * LATENT_HEADS * (2 * LATENT + ROTATED)
    figure(
        f"gpu_latent_attention_decode_{sequences}x{keys}", moved / ms / 1e6, "GB/s",
        peer="measured copy bandwidth", peer_value=ceilings.copy / 1e9, at_least=0.3, aim=0.6,
        settings={"splits": splits, "heads": LATENT_HEADS, "tflops": round(work / ms / 1e9, 1)},
    )  # fmt: skip


def _peer_ms(q: Tensor, keys: int, causal: bool) -> float:
    shape = (q.shape[0], KV_HEADS, keys, DIM)
    k, v = (torch.randn(shape, dtype=q.dtype, device="cuda") for _ in range(2))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return median_ms(_flash(q, k, v, causal))
