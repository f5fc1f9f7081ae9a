"""Checkpoints by GPTQ and AWQ: a matrix X.weight is X.qweight, X.qzeros and X.scales.

Words of 32 bits hold codes, the first in the lowest bits: GPTQ's `qweight` [in / 8, out] eight inputs of
an output, AWQ's [in, out / 8] eight outputs of an input, the even ones first. `qzeros` [groups, out / 8]
has outputs in the same order, GPTQ's first version each less one; `scales` is [groups, out]. A value is
scale * (code - zero). Where GPTQ sorted the inputs into groups, `g_idx` [in] says which group each has.

The layouts are those of AutoGPTQ (`qlinear_cuda_old.py`) and AutoAWQ (`gemm.py`).
"""

from pathlib import Path

import torch

from engine.backends.layers.packed import Codes
from engine.errors import CheckpointError
from engine.models.formats.declared import Grouped
from engine.models.formats.quantised import GROUPED
from engine.models.formats.quantised_source import QuantisedSource

_WEIGHT, _CODES, _ZEROS, _SCALES, _INDEX = "weight", "qweight", "qzeros", "scales", "g_idx"
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of the outputs 0 to 7 in a word of AWQ


class GroupedSource(QuantisedSource):
    """Implements `engine.models.weights.TensorSource`."""

    def __init__(self, directory: Path, scheme: Grouped) -> None:
        super().__init__(directory, GROUPED)
        self._scheme = scheme

    @property
    def format(self) -> str:
        return f"{self._scheme.method}, {self._scheme.bits} bits"

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or self._stem(name) is not None

    def place(self, name: str) -> str:
        stem = self._stem(name)
        return super().place(name if stem is None else stem + _CODES)

    def shape(self, name: str) -> tuple[int, ...]:
        stem = self._stem(name)
        if stem is None:
            return super().shape(name)
        words = super().shape(stem + _CODES)
        if len(words) != 2:
            raise CheckpointError(
                f"{self.place(name)} has shape {list(words)}: two sizes are needed"
            )
        each = 32 // self._scheme.bits
        gptq = self._scheme.method == "gptq"
        return (words[1], words[0] * each) if gptq else (words[1] * each, words[0])

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        codes = self.codes(name)
        return super().read(name, dtype) if codes is None else codes.dense().to(dtype)

    def codes(self, name: str, small_floats: bool = False) -> Codes | None:
        stem = self._stem(name)
        if stem is None:
            return None
        out, width = self.shape(name)
        group = self._scheme.group or width
        if width % group:
            raise CheckpointError(
                f"{self.place(name)} has {width} inputs, which are not whole groups of {group}"
            )
        sorted_by = stem + _INDEX
        if sorted_by not in self._files and self._scheme.by_activation:
            raise CheckpointError(f"{self.path}: tensor {sorted_by} is missing")
        order = self.order(sorted_by, width, group)
        scales = self._scales(stem, (width // group, out))
        zeros = self._zeros(stem, (width // group, out))
        codes = self._unpacked(stem)
        bits, first = self._scheme.bits, int(zeros[0, 0])
        same = bool((zeros == first).all())
        # One zero for all is kept exactly; others become minima, which are rounded to float16.
        zero = (first if same else 0) if bits == 4 else 128
        return Codes(
            codes=codes if order is None else codes[:, order],
            scales=scales,
            minima=None if same and first == zero else scales * (zero - zeros.float()),
            bits=bits,
            group=self.check_group(name, group, width),
            zero=zero,
            order=order,
        )

    def _stem(self, name: str) -> str | None:
        """The name up to `qweight`, for a matrix that is quantised."""
        stem = name.removesuffix(_WEIGHT)
        return stem if stem != name and stem + _CODES in self._files else None

    def _words(self, name: str) -> torch.Tensor:
        """The codes [rows, words, 32 / bits] of a tensor in words."""
        words = self.needed(name)
        if words.dtype is not torch.int32 or words.dim() != 2:
            raise CheckpointError(
                f"{super().place(name)} is {words.dtype} {list(words.shape)}: words of int32 in two "
                "dimensions are needed"
            )
        parts = words.contiguous().view(torch.uint8).view(*words.shape, 4)
        if self._scheme.bits == 4:
            parts = torch.stack((parts & 15, parts >> 4), -1).flatten(-2)
        return parts if self._scheme.method == "gptq" else parts[..., _PLACES]

    def _unpacked(self, stem: str) -> torch.Tensor:
        """[out, in]"""
        parts = self._words(stem + _CODES)
        if self._scheme.method == "gptq":
            return parts.transpose(0, 1).flatten(1)
        return parts.flatten(1).t().contiguous()

    def _zeros(self, stem: str, shape: tuple[int, int]) -> torch.Tensor:
        """[out, groups]"""
        bits, place = self._scheme.bits, self.path / (stem + _ZEROS)
        words = self._words(stem + _ZEROS)
        if words.shape[:2] != (shape[0], -(-shape[1] * bits // 32)):
            raise CheckpointError(
                f"{place} has shape {list(words.shape[:2])}: {bits} bits for each of {list(shape)} are "
                "needed"
            )
        zeros = words.flatten(1)[:, : shape[1]].t()
        if self._scheme.less_one:
            # A zero of 0 was stored as all bits set, of which these are left.
            zeros = (zeros + 1) & ((1 << bits) - 1)
        if self._scheme.symmetric and (zeros != 1 << (bits - 1)).any():
            raise CheckpointError(
                f"{place} holds zero points other than {1 << (bits - 1)}, but config.json says that the "
                "codes are symmetric: correct the one that is wrong"
            )
        return zeros

    def _scales(self, stem: str, shape: tuple[int, int]) -> torch.Tensor:
        """[out, groups] in float32"""
        scales = self.needed(stem + _SCALES)
        place = super().place(stem + _SCALES)
        if scales.shape != shape or not scales.is_floating_point():
            raise CheckpointError(
                f"{place} is {scales.dtype} {list(scales.shape)}: floats of {list(shape)} are needed"
            )
        scales = scales.float().t().contiguous()
        if not torch.isfinite(scales).all() or (scales == 0).any():
            raise CheckpointError(f"{place} holds values that are zero, NaN or infinite")
        return scales
