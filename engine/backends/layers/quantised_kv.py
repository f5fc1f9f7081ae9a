"""Keys and values in 8 bits: a scale for each head of each position.

A row of the pool, one head of a block, has the codes of its positions and then their scales, in
bfloat16 and never below the value's own, so that no code is cut off. As every position has a scale of
its own, what a row of the batch stores does not depend on the others, and a position can be written
again. On a CPU attention reads the rows as floats: the compiled kernel widens them while it gathers,
torch after. On a GPU its kernel reads codes and scales.
"""

import torch

from engine.backends.compiled.linear import DTYPES, compiled, has_kernel, instructions
from engine.backends.layers.kv import SCALE_BYTES, KvPool
from engine.cache.parts import Windowed
from engine.config import EngineConfig
from engine.model_spec import ModelSpec

_LARGEST = {"int8": 127.0, "fp8": 448.0}
_LEAST_SCALE = 2.0**-64
_CPU = torch.device("cpu")


class QuantizedKvPool(KvPool):
    """A pool whose rows are bytes."""

    def __init__(
        self,
        spec: ModelSpec,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: str,
        device: torch.device = _CPU,
        *,
        windowed: Windowed | None = None,
    ) -> None:
        self._fp8 = kv_dtype == "fp8"
        super().__init__(spec, blocks, block_size, dtype, device, windowed)

    def _row(self) -> tuple[tuple[int, ...], torch.dtype]:
        return (self.block_size * (self.head_dim + SCALE_BYTES),), torch.uint8

    def _slot_views(self) -> list[torch.Tensor]:
        return []

    def layer_caches(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        bytes_of_codes = self.block_size * self.head_dim
        kind = torch.float8_e4m3fn if self._fp8 else torch.int8
        found: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        for layer in self._layers():
            codes = torch.unflatten(
                layer[..., :bytes_of_codes], -1, (self.block_size, self.head_dim)
            )
            found.append((codes.view(kind), layer[..., bytes_of_codes:].view(torch.bfloat16)))
        return found

    def write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        if not has_kernel() or kv.dtype not in DTYPES:
            self._write(layer, kv_slots, kv)
            return
        if kv.stride()[1:] != (self.head_dim, 1):
            kv = kv.contiguous()
        compiled().store_kv(
            self.rows[layer].data_ptr(), kv_slots.data_ptr(), kv.data_ptr(), kv.stride(0),
            kv_slots.numel(), self.heads, self.head_dim, self.block_size,
            kv.dtype is torch.bfloat16, self._fp8,
        )  # fmt: skip

    def _write(self, layer: int, kv_slots: torch.Tensor, kv: torch.Tensor) -> None:
        codes, scales = quantise_heads(kv, self._fp8)
        row, place = kv_slots // self.block_size, kv_slots % self.block_size
        stored_codes, stored_scales = self._parts(self.rows[layer])
        stored_codes.index_put_((row, place), codes)
        stored_scales.index_put_((row, place), scales)

    def gather(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        if not has_kernel() or self.dtype not in DTYPES:
            codes, scales = self._parts(self.rows[layer].index_select(0, rows))
            return (
                (widened(codes, self._fp8) * scales.float()[:, :, None]).to(self.dtype).flatten(1)
            )
        out = torch.empty((len(rows), self.block_size * self.head_dim), dtype=self.dtype)
        compiled().gather_kv(
            self.rows[layer].data_ptr(), rows.data_ptr(), out.data_ptr(), len(rows), self.head_dim,
            self.block_size, self.dtype is torch.bfloat16, self._fp8, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def paged(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gather(layer, rows), torch.arange(len(rows))

    def _clear(self, heads: torch.Tensor, offset: int) -> None:
        codes, scales = self._parts(heads.flatten(0, 1))
        codes[:, offset:].zero_()
        scales[:, offset:].zero_()

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of rows: codes [rows, block size, head_dim] and scales [rows, block size]."""
        codes = rows[:, : self.block_size * self.head_dim]
        scales = rows[:, codes.shape[1] :].view(torch.bfloat16)
        return codes.view(len(rows), self.block_size, self.head_dim), scales


def quantise_heads(kv: torch.Tensor, fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as bytes, and bfloat16 scales, of each last dimension. The scale of values that are not
    finite is NaN, and so is what is read of them."""
    kv = kv.float()
    largest = kv.abs().amax(-1)
    exact = (largest / _LARGEST["fp8" if fp8 else "int8"]).clamp(min=_LEAST_SCALE)
    up = (exact.view(torch.int32) + 0xFFFF) & ~0xFFFF  # to bfloat16, never down
    scales = up.view(torch.float32).masked_fill(~largest.isfinite(), float("nan"))
    codes = (kv * (1.0 / scales)[..., None]).nan_to_num(0.0)
    stored = codes.to(torch.float8_e4m3fn) if fp8 else codes.round().to(torch.int8)
    return stored.view(torch.uint8), scales.bfloat16()


def widened(codes: torch.Tensor, fp8: bool) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn if fp8 else torch.int8).float()


def make_pool(
    config: EngineConfig,
    spec: ModelSpec,
    blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    windowed: Windowed | None = None,
) -> KvPool:
    if config.kv_dtype == "auto":
        return KvPool(spec, blocks, config.block_size, dtype, device, windowed)
    return QuantizedKvPool(
        spec, blocks, config.block_size, dtype, config.kv_dtype, device, windowed=windowed
    )


def kv_name(config: EngineConfig, dtype: torch.dtype) -> str:
    """What the root of the cache's keys says of keys and values: blocks of another are never found."""
    name = str(dtype).removeprefix("torch.")
    if config.batch_invariant:
        name += f"-by-row-{instructions()}"
    # With `kv_heavy`, only blocks whose positions see all are kept.
    if config.kv_sight_of_all.window:
        name += f"-window-{config.kv_window}-{config.kv_sinks}"
    return name if config.kv_dtype == "auto" else f"{name}/{config.kv_dtype}"
