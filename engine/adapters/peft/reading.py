"""What an adapter's tensors change of the base model, checked against its shapes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.adapters.digest import CONFIG, WEIGHTS
from engine.adapters.peft.config import invalid, scale_of
from engine.adapters.peft.keys import Found
from engine.adapters.peft.names import HEAD, TABLE
from engine.backends.layers.adapter_extras import (
    AdapterExtras,
    HeadChange,
    Pair,
    Rescale,
    TableChange,
)
from engine.backends.layers.matrices import fused_rows, own_name, part_shape
from engine.models.base_weights import BaseWeights


class Reading:
    """What has been read of one adapter."""

    def __init__(
        self,
        directory: Path,
        config: dict[str, Any],
        base: BaseWeights,
        dtype: torch.dtype,
        max_rank: int,
        unverified: bool,
    ) -> None:
        self.matrices: dict[tuple[int, str], Pair] = {}
        self._inner: dict[tuple[int, str], Pair] = {}
        self._rescales: dict[tuple[int, str], Rescale] = {}
        self._bytes = 0  # of the extras
        self._path = directory / WEIGHTS
        self._config_path = directory / CONFIG
        self._config = config
        self._base = base
        self._spec = base.spec
        self._dtype = dtype
        self._max_rank = max_rank
        self._unverified = unverified

    def layer_module(self, layer: int, module: str, parts: tuple[str, ...], found: Found) -> None:
        name, spec = f"layer {layer} {module}", self._spec
        if layer >= spec.cached_layers and parts[0] in ("k", "v"):
            return  # the layer reads those of an earlier one, and training left it without effect
        width = part_shape(spec, parts[0])[0]
        out = sum(part_shape(spec, part)[1] for part in parts)
        rows = fused_rows(spec, module) if module in spec.fused else {parts[0]: slice(None)}
        if found.keys() == {"bias"}:
            for part, each in rows.items():
                self._rescale_part(name, (layer, part), found, each, None)
            return
        a, b, scale = self._pair(name, f"model.layers.{layer}.{module}", found, (width, out))
        for part, each in rows.items():
            if (layer, part) in self.matrices:
                raise invalid(self._path, f"{name} is there as a whole and in parts")
            some = b[each]
            rescale = self._rescale_part(name, (layer, part), found, each, (a, some, scale))
            if "magnitude" in found and rescale is not None:
                some = some.float() * rescale.factor[:, None]
            pair = (
                a.to(_storage_dtype(a.dtype, 1.0, self._dtype)),
                _transposed(some, scale, _storage_dtype(some.dtype, scale, self._dtype)),
            )
            for half, tensor in zip("AB", pair, strict=True):
                self._check_finite(f"{name} lora_{half}", tensor)
            self.matrices[layer, part] = pair

    def inner_module(
        self, layer: int, module: str, target: tuple[str, int, int], found: Found
    ) -> None:
        """target: of `modules.inner_modules`."""
        name, (own, width, out) = f"layer {layer} {module}", target
        if "bias" in found:
            raise invalid(self._path, f"{name} has a bias, which is not served there")
        if "magnitude" in found:
            raise invalid(
                self._path,
                f"{name} has a lora_magnitude_vector: DoRA is not served there, train without use_dora",
            )
        a, b, scale = self._pair(name, f"model.layers.{layer}.{module}", found, (width, out))
        b = _transposed(b, scale, self._dtype)
        self._inner[layer, own] = self._kept(f"{name} lora_A", a), self._kept(f"{name} lora_B", b)

    def _rescale_part(
        self,
        name: str,
        place: tuple[int, str],
        found: Found,
        rows: slice | torch.Tensor,
        change: tuple[torch.Tensor, torch.Tensor, float] | None,
    ) -> Rescale | None:
        """Of the part at `place`, (layer, part), which is `rows` of the module: DoRA's lengths and a bias
        in place of the base's; None without either. change: A, B and their scale."""
        if "magnitude" not in found and "bias" not in found:
            return None
        weight, bias = self._base.matrix(*place)
        if change is not None and "magnitude" in found:
            magnitude = found["magnitude"].float()[rows]
            rescale = self._rescale(name, weight, magnitude, change, bias)
        else:
            rescale = Rescale(torch.ones(len(weight)))
        if "bias" in found:
            rescale = self._with_bias(name, rescale, found["bias"], rows, bias)
        self._rescales[place] = rescale
        return rescale

    def _with_bias(
        self,
        name: str,
        rescale: Rescale,
        own: torch.Tensor,
        rows: slice | torch.Tensor,
        bias: torch.Tensor | None,
    ) -> Rescale:
        """own: the adapter's [out of the module]; bias: the base's, of the part alone."""
        if bias is None:
            raise invalid(self._path, f"{name} has a bias, and the base model none there")
        if own.dim() != 1 or own[rows].shape != bias.shape:
            raise invalid(
                self._path, f"{name} has {list(own.shape)} biases: {list(bias.shape)} are needed"
            )
        shift = own.float()[rows] - rescale.factor * bias
        self._check_finite(f"{name} bias", shift)
        return Rescale(rescale.factor, shift)

    def table(self, found: Found | None) -> TableChange | None:
        """A module whose input is one token, of which the product is its column of A."""
        if not found:
            return None
        shape = self._spec.vocab, self._spec.hidden
        whole = self._whole(TABLE, found, self._base.table)
        pair, rescale = self._outer(TABLE, f"model.{TABLE}", found, shape, whole)
        if whole is None and pair is None:
            return None
        return TableChange(None if whole is None else self._kept(TABLE, whole), pair, rescale)

    def head(self, found: Found | None) -> HeadChange | None:
        if not found:
            return None
        shape = self._spec.hidden, self._spec.vocab
        whole = self._whole(HEAD, found, self._base.head)
        pair, rescale = self._outer(HEAD, HEAD, found, shape, whole)
        if whole is None and pair is None:
            return None
        return HeadChange(None if whole is None else self._kept(HEAD, whole), pair, rescale)

    def _outer(
        self,
        name: str,
        module: str,
        found: Found,
        shape: tuple[int, int],
        whole: torch.Tensor | None,
    ) -> tuple[Pair | None, Rescale | None]:
        """A^T and B^T, scaled, of the token table or the head. whole: in place of the base's."""
        if "A" not in found and "B" not in found:
            return None, None
        a, b, scale = self._pair(name, module, found, shape)
        rescale = None
        if "magnitude" in found:
            base = self._base.table if name == TABLE else self._base.head
            weight = base() if whole is None else whole
            weight = weight.t() if name == TABLE else weight
            rescale = self._rescale(name, weight, found["magnitude"], (a, b, scale))
            b = b.float() * rescale.factor[:, None]
        pair = self._kept(name, a.t()), self._kept(name, _transposed(b, scale, self._dtype))
        return pair, self._cast(rescale)

    def extras(self, table: TableChange | None, head: HeadChange | None) -> AdapterExtras | None:
        if not (self._rescales or self._inner or table or head):
            return None
        cast = {key: self._cast(each) for key, each in self._rescales.items()}
        kept = {k: each for k, each in cast.items() if each}
        return AdapterExtras(kept, self._inner, table, head, self._bytes)

    def _pair(
        self, name: str, module: str, found: Found, shape: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """A [rank, in] and B [out, rank] as they are stored, and their scale. shape: (in, out)."""
        path, (width, out) = self._path, shape
        if "A" not in found or "B" not in found:
            half = next((each for each in "AB" if each in found), "magnitude_vector")
            raise invalid(path, f"{name} has lora_{half} without the other half")
        a, b = found["A"], found["B"]
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != width or b.shape[0] != out:
            raise invalid(
                path,
                f"{name} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; the base model needs "
                f"[rank, {width}] and [{out}, rank]: was it trained on another base?",
            )
        rank = a.shape[0]
        if b.shape[1] != rank or not 1 <= rank <= self._max_rank:
            raise invalid(
                path,
                f"{name} has rank {rank} in A, {b.shape[1]} in B: both must be 1 to {self._max_rank}",
            )
        if bool(self._config.get("use_dora")) != ("magnitude" in found):
            lacks = "no" if self._config.get("use_dora") else "a"
            raise invalid(
                path, f"{name} has {lacks} lora_magnitude_vector, against use_dora of {CONFIG}"
            )
        if "magnitude" in found and found["magnitude"].shape != (out,):
            raise invalid(
                path, f"{name} has {list(found['magnitude'].shape)} magnitudes: [{out}] are needed"
            )
        own = own_name(self._spec, f"{module}.").removesuffix(".")
        return a, b, scale_of(self._config, own, rank, self._config_path)

    def _rescale(
        self,
        name: str,
        weight: torch.Tensor,
        magnitude: torch.Tensor,
        change: tuple[torch.Tensor, torch.Tensor, float],
        bias: torch.Tensor | None = None,
    ) -> Rescale:
        """weight: [out, in] of the base; change: A, B and their scale."""
        a, b, scale = change
        length = torch.addmm(weight, b.float(), a.float(), alpha=scale).norm(dim=1)
        factor = magnitude.float() / length
        self._check_finite(name, factor)
        return Rescale(factor, None if bias is None else bias * (1 - factor))

    def _whole(
        self, name: str, found: Found, base: Callable[[], torch.Tensor]
    ) -> torch.Tensor | None:
        """The matrix that stands for the base's, unless it is the base's own, which PEFT saves
        together with an adapter of the token table or head."""
        if "base" in found and "whole" in found:
            raise invalid(self._path, f"{name} is there twice")
        tensor = found.get("whole", found.get("base"))
        if tensor is None:
            return None
        spec = self._spec
        if tensor.shape != (spec.vocab, spec.hidden):
            raise invalid(
                self._path,
                f"{name} is {list(tensor.shape)}, the base model's [{spec.vocab}, {spec.hidden}]: "
                "adapters with tokens of their own are not served",
            )
        if "base" in found and torch.equal(base().to(tensor.dtype), tensor):
            return None
        return tensor.float()

    def _kept(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.to(self._dtype).contiguous()
        self._check_finite(name, kept)
        self._bytes += kept.nbytes
        return kept

    def _cast(self, rescale: Rescale | None) -> Rescale | None:
        if rescale is None:
            return None
        shift = None if rescale.shift is None else rescale.shift.to(self._dtype)
        return Rescale(rescale.factor.to(self._dtype), shift)

    def _check_finite(self, name: str, tensor: torch.Tensor) -> None:
        """Also finds values that overflow the compute dtype. The sum is one quick pass; only when it
        is not finite are the values checked one by one."""
        if not self._unverified or math.isfinite(tensor.sum(dtype=torch.float32).item()):
            return
        if not torch.isfinite(tensor).all():
            raise invalid(self._path, f"{name} has NaN or infinite values")


def _storage_dtype(stored: torch.dtype, scale: float, computed: torch.dtype) -> torch.dtype:
    """The type kept in host memory: a half type stays where scaling leaves its values exact."""
    exact = scale == 1.0 or (stored is torch.bfloat16 and math.frexp(scale)[0] == 0.5)
    return stored if computed is torch.float32 and stored.itemsize == 2 and exact else computed


def _transposed(b: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """B^T times the scale, which is applied before the values are rounded to another type."""
    # NumPy has no bfloat16, but transposes a narrow matrix three times as fast as torch.
    bits = b.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[b.itemsize])
    transposed = torch.from_numpy(np.ascontiguousarray(bits.numpy().T)).view(b.dtype)
    return transposed.to(dtype) if scale == 1.0 else transposed.float().mul_(scale).to(dtype)
