"""Adapters whose matrices are packed as the base's are: one product has a row's base and what its adapter
adds, rounded once. An adapter's bytes are read once for all of its rows."""

from dataclasses import dataclass
from itertools import accumulate

import torch

from engine.backends.compiled.linear import KINDS, compiled, has_kernel, multiplies, pack_tiles
from engine.backends.layers.adapter_extras import ExtraRows
from engine.backends.layers.compiled_tables import compiled_table
from engine.backends.layers.host_memory import lazy_zeros
from engine.backends.layers.lora import LoraStep, Matrices
from engine.backends.layers.matrices import PARTS, SITES, part_shape, sites_of
from engine.backends.layers.operations import GatedSite, Site
from engine.model_spec import ModelSpec

_SITES = tuple(SITES)
_NONE = 0  # no matrix: sums are added to what is there
_LANES, _STEP = 16, 32  # outputs of a tile; inputs that the widest instructions take at once


# (matrices, offsets, changed, rank, first row, rows): see `engine/backends/compiled/adapters.h`.
Listed = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """Of one adapter: one piece of memory, in huge pages, in which a processor reads ahead as it does in
    the base's weights."""

    rank: int  # filled up with zeros
    data: torch.Tensor
    offsets: torch.Tensor  # bytes, [layers, sites + parts]: A of the sites, B of the parts
    changed: torch.Tensor  # whether the adapter changes a part: [layers, parts]

    def listed(self, first: int, rows: int) -> Listed:
        """What `engine/backends/compiled/adapters.h` reads of an adapter and its rows."""
        places = self.data.data_ptr(), self.offsets.data_ptr(), self.changed.data_ptr()
        return *places, self.rank, first, rows


def adds_packed(spec: ModelSpec, dtype: torch.dtype) -> bool:
    """Whether adapters are packed for a model whose layers are computed one operation at a time, too: its
    products may be torch's, and adapters are added to what they gave."""
    widths = spec.hidden, spec.intermediate, spec.q_width, 2 * spec.kv_width
    if not has_kernel() or dtype is not torch.bfloat16 or not multiplies(dtype):
        return False
    usual = all(sites_of(spec, layer) == SITES for layer in range(spec.layers))
    return usual and all(width % _STEP == 0 for width in widths)


def packed_matrices(
    spec: ModelSpec, rank: int, matrices: Matrices, dtype: torch.dtype
) -> PackedMatrices:
    """`rank`: the largest of the matrices' ranks."""
    filled, shapes = _filled(rank), _shapes(spec, rank)
    sizes = [_tiles(out) * _LANES * width for out, width in shapes]
    ends = list(accumulate(sizes * spec.layers))
    data = lazy_zeros((ends[-1],), dtype, huge=True)
    offsets = torch.tensor([0, *ends[:-1]]).view(spec.layers, -1)
    changed = torch.zeros(spec.layers, len(PARTS), dtype=torch.uint8)

    def put(layer: int, number: int, matrix: torch.Tensor) -> None:
        out, width = shapes[number]
        first = int(offsets[layer, number])
        target = data[first : first + sizes[number]]
        pack_tiles(matrix, target.view(_tiles(out) * _LANES, width))

    for layer in range(spec.layers):
        for number, (_, parts) in enumerate(SITES.items()):
            pairs = [matrices.get((layer, part)) for part in parts]
            if all(pair is None for pair in pairs):
                continue
            joined = torch.zeros(shapes[number], dtype=dtype)
            for at, (part, pair) in enumerate(zip(parts, pairs, strict=True)):
                if pair is None:
                    continue
                a, b = pair
                joined[at * filled : at * filled + len(a)] = a
                column = PARTS.index(part)
                changed[layer, column] = 1
                wide = torch.zeros(b.shape[1], filled, dtype=dtype)
                wide[:, : len(b)] = b.T
                put(layer, len(SITES) + column, wide)
            put(layer, number, joined)
    return PackedMatrices(filled, data, offsets * dtype.itemsize, changed)


def packed_bytes(spec: ModelSpec, rank: int, dtype: torch.dtype) -> int:
    """Bytes of one adapter of this rank."""
    each = sum(_tiles(out) * _LANES * width for out, width in _shapes(spec, rank))
    return spec.layers * each * dtype.itemsize


class PackedLoraStep(LoraStep):
    """`rows`: the adapters of the step's rows in their order, (adapter, first row, rows); those of one
    rank are neighbours."""

    def __init__(
        self, spec: ModelSpec, rows: list[tuple[PackedMatrices, int, int]], extras: list[ExtraRows]
    ) -> None:
        super().__init__({}, [], extras)
        self._spec = spec
        self._matrices = [adapter for adapter, _, _ in rows]  # as long as their addresses are used
        self.listed = [adapter.listed(first, count) for adapter, first, count in rows]

    def product(
        self,
        site: Site,
        x: torch.Tensor,
        other: torch.Tensor | None = None,
        activation: str = "silu",
    ) -> torch.Tensor | None:
        linear = site.linear
        if self.extras:  # which may change the base's products before anything is added
            return None
        table = compiled_table(linear)
        if table is None and isinstance(site, GatedSite):
            return None
        if table is None:
            out = linear(x) if other is None else linear.plus(x, other)
            self._call((site.layer, site.name, -1), _NONE, x, (out, out), activation)
            return out
        out = x.new_empty(len(x), table.outputs)
        other = None if other is None else other.contiguous()
        self._call((site.layer, site.name, -1), table.address, x, (out, other), activation)
        return out

    def add_(self, layer: int, site: str, x: torch.Tensor, *outputs: torch.Tensor) -> None:
        for number, output in enumerate(outputs):
            self._call((layer, site, number), _NONE, x, (output, output), "silu")

    def changes(self, layer: int, site: str) -> bool:
        columns = [PARTS.index(part) for part in SITES[site]]
        return any(bool(each.changed[layer, columns].any()) for each in self._matrices)

    def _parts(self, layer: int, site: str) -> tuple[str, ...]:
        return SITES[site]

    def _call(
        self,
        place: tuple[int, str, int],
        matrices: int,
        x: torch.Tensor,
        outputs: tuple[torch.Tensor, torch.Tensor | None],
        activation: str,
    ) -> None:
        """place: layer, site, and the only part whose outputs these are, or -1. matrices: the site's
        table, or `_NONE`. outputs: what is written, and what is added, which may be the same."""
        (layer, site, part), (out, other) = place, outputs
        spec, x = self._spec, x.contiguous()
        ends = (
            (spec.q_width, spec.q_width + spec.kv_width) if site == "qkv" and part < 0 else (0, 0)
        )
        compiled().adapted(
            self.listed, layer, _SITES.index(site), part, matrices, ends, x.data_ptr(),
            out.data_ptr(), 0 if other is None else other.data_ptr(),
            (*x.shape, out.shape[1], out.stride(0), KINDS[activation]), x.dtype is torch.bfloat16,
            torch.get_num_threads(),
        )  # fmt: skip


def _filled(rank: int) -> int:
    """bfloat16 is multiplied in pairs, and the widest instructions take up to 32 inputs at once."""
    return rank + rank % 2 if rank <= _STEP else -(-rank // _STEP) * _STEP


def _tiles(out: int) -> int:
    return -(-out // _LANES)


def _shapes(spec: ModelSpec, rank: int) -> list[tuple[int, int]]:
    """(out, in) of A of each site, then of B of each part, of any layer."""
    filled = _filled(rank)
    sites = [(len(parts) * filled, part_shape(spec, parts[0])[0]) for parts in SITES.values()]
    return sites + [(part_shape(spec, part)[1], filled) for part in PARTS]
