"""Token tables and heads of adapters on a GPU: in the adapter's blocks, and computed for each adapter's
rows by torch and the segmented LoRA kernels (`lora.py`), which read rows wherever they lie."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.backends.gpu.adapters import lora_launch
from engine.backends.gpu.adapters.adapter_image import AdapterImage
from engine.backends.gpu.adapters.lora_reference import UNIT, LoraSite, LoraStep
from engine.backends.layers.adapter_extras import AdapterExtras, HeadChange, TableChange
from engine.backends.layers.transfer import on_device

_PIECE = 4096  # columns of a piece of a row, which may be longer than a block
_SLICE = 1024  # rows of a whole head that a program multiplies


@dataclass(frozen=True, slots=True)
class Paged:
    """A matrix in an image or in the arena, each row in pieces of equal length."""

    places: Tensor  # [rows, pieces] int32: where each begins, in units
    columns: int
    piece: int  # columns of a piece, a multiple of the unit

    def rows(self, arena: Tensor, which: Tensor) -> Tensor:
        """[which, columns]"""
        units = arena[: arena.numel() // UNIT * UNIT].view(-1, UNIT)
        steps = torch.arange(self.piece // UNIT, device=arena.device)
        places = self.places.index_select(0, which)[..., None] + steps
        return units.index_select(0, places.flatten()).view(len(which), -1)[:, : self.columns]

    def elements(self, arena: Tensor, which: Tensor) -> Tensor:
        """The columns `which`, as rows: [which, rows]"""
        places = self.places.t().index_select(0, which // self.piece).long()
        return arena[places * UNIT + (which % self.piece)[:, None]]

    def vector(self, arena: Tensor) -> Tensor:
        """The only row: [columns]"""
        return self.rows(arena, torch.zeros(1, dtype=torch.int64, device=arena.device))[0]


@dataclass(frozen=True, slots=True)
class End:
    """A token table or a head. `whole` [vocab, hidden] stands for the base's, whose outputs have the
    `factor`; `inner` and `outer` are the pair, [rank, in] and [rank, out]."""

    whole: Paged | None
    factor: Paged | None
    inner: Paged | None
    outer: Paged | None

    def placed(self, place: Callable[[Tensor], Tensor]) -> "End":
        parts = (self.whole, self.factor, self.inner, self.outer)
        return End(*(each and replace(each, places=place(each.places)) for each in parts))


@dataclass(frozen=True, slots=True)
class Ends:
    """One adapter's."""

    table: End | None
    head: End | None

    def placed(self, place: Callable[[Tensor], Tensor]) -> "Ends":
        """`place` makes units of the arena of offsets in the image."""
        return Ends(*(each and each.placed(place) for each in (self.table, self.head)))


PackedEnds = Ends  # whose places are offsets in the image


def pack_ends(extras: AdapterExtras, image: AdapterImage) -> PackedEnds | None:
    """None if the adapter has neither."""
    if extras.table is None and extras.head is None:
        return None
    table = None if extras.table is None else _pack_end(extras.table, image)
    return Ends(table, None if extras.head is None else _pack_end(extras.head, image))


def _pack_end(change: TableChange | HeadChange, image: AdapterImage) -> End:
    assert change.whole is None or isinstance(change.whole, Tensor)  # as the reader makes it

    def packed(matrix: Tensor) -> Paged:
        rows, columns = matrix.shape
        piece = min(-(-columns // UNIT), _PIECE // UNIT, image.units) * UNIT
        pieces = -(-columns // piece)
        cut = F.pad(matrix, (0, pieces * piece - columns)).view(rows * pieces, piece)
        return Paged(image.add(cut).view(rows, pieces), columns, piece)

    def in_one_piece(matrix: Tensor) -> Paged:
        """The kernel that shrinks reads rows of inputs so. Raises ValueError for rows that are longer
        than a block."""
        return Paged(
            image.add(matrix)[:, None], matrix.shape[1], -(-matrix.shape[1] // UNIT) * UNIT
        )

    inner = outer = None
    if change.pair is not None:
        first = change.pair[0].t().contiguous()
        inner = in_one_piece(first) if isinstance(change, HeadChange) else packed(first)
        outer = packed(change.pair[1])
    return End(
        None if change.whole is None else in_one_piece(change.whole),
        None if change.rescale is None else packed(change.rescale.factor[None]),
        inner,
        outer,
    )


def change_table(table: End, arena: Tensor, tokens: Tensor, x: Tensor) -> Tensor:
    """The table's rows [rows, hidden] for these tokens. x: the base's, which are changed."""
    if table.whole is not None:
        x = table.whole.rows(arena, tokens).contiguous()
    if table.factor is not None:
        x.mul_(table.factor.vector(arena))
    if table.inner is not None and table.outer is not None:
        mid = table.inner.elements(arena, tokens).float()[None, :, None].contiguous()
        _expand(x, mid, arena, table.outer)
    return x


def change_logits(head: End, arena: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The logits [rows, vocab] of normed states x. y: the base's, which are changed."""
    if head.whole is not None:
        y = _whole_product(head.whole, arena, x)
    if head.factor is not None:
        y.mul_(head.factor.vector(arena))
    if head.inner is not None and head.outer is not None:
        step = _all_rows(x, len(head.inner.places))
        site = _site(head.inner, head.outer)
        mid = lora_launch.shrink_buffer(x, site, step)
        lora_launch.shrink(x, arena, site, step, mid)
        _expand(y, mid, arena, head.outer)
    return y


def _expand(y: Tensor, mid: Tensor, arena: Tensor, outer: Paged) -> None:
    """y += mid B. Each piece of B is a slice, and all of them read one `mid`."""
    rank, pieces = outer.places.shape
    spans = [
        (first, min(outer.piece, outer.columns - first))
        for first in range(0, outer.columns, outer.piece)
    ]
    site = LoraSite(
        rows=outer.places.t()[None, :, None].expand(1, pieces, 2, rank).contiguous(),
        ranks=_number(rank, pieces, arena.device),
        spans=on_device(spans, arena.device, torch.int32),
        inputs=0,
        widest=outer.piece,
    )
    lora_launch.expand(y, mid.expand(-1, -1, pieces, -1), arena, site, _all_rows(y, rank))


def _site(inner: Paged, outer: Paged) -> LoraSite:
    """A of one slice, for the kernel that shrinks."""
    rank = len(inner.places)
    places = inner.places.t()[None, :, None].expand(1, 1, 2, rank).contiguous()
    ranks = _number(rank, 1, places.device)
    return LoraSite(places, ranks, _spans(1, places.device), inner.columns, outer.piece)


def _whole_product(whole: Paged, arena: Tensor, x: Tensor) -> Tensor:
    """x W^T: the rows of W are those of an A without a B, some for each slice."""
    vocab = len(whole.places)
    slices = -(-vocab // _SLICE)
    places = F.pad(whole.places[:, 0], (0, slices * _SLICE - vocab)).view(1, slices, 1, _SLICE)
    counts = [min(_SLICE, vocab - first) for first in range(0, vocab, _SLICE)]
    site = LoraSite(
        rows=places,
        ranks=on_device([counts], arena.device, torch.int32),
        spans=_spans(slices, arena.device),
        inputs=whole.columns,
        widest=_SLICE,
    )
    step = _all_rows(x, _SLICE)
    mid = lora_launch.shrink_buffer(x, site, step)
    lora_launch.shrink(x, arena, site, step, mid)
    return mid.sum(0).flatten(1)[:, :vocab].to(x.dtype)


def _all_rows(x: Tensor, rank: int) -> LoraStep:
    """A step in which every row of x has the adapter of slot 0."""
    size = 16 if x.shape[0] <= 256 else 64
    ends = [*range(0, x.shape[0], size), x.shape[0]]
    chunks = [(0, first, end - first) for first, end in pairwise(ends)]
    order = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
    return LoraStep(order, on_device(chunks, x.device, torch.int32), size, rank)


def _number(value: int, count: int, device: torch.device) -> Tensor:
    return torch.full((1, count), value, dtype=torch.int32, device=device)


def _spans(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, 2, dtype=torch.int32, device=device)
