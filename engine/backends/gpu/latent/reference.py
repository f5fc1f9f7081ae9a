"""The references for the kernels of latent attention, in plain torch."""

import torch
from torch import Tensor

from engine.backends.gpu.adapters.lora_reference import UNIT, LoraSite, LoraStep
from engine.backends.gpu.latent.launch import Rows
from engine.backends.gpu.pointwise_reference import Pairs, RotaryStep, rms_norm_reference, rotate
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.quantised_kv import quantise_heads


def place_latent_reference(
    out: Tensor, q: Tensor, keys: Tensor, step: RotaryStep, table: Tensor, norm: RmsNorm,
    *, kv: Tensor, scales: Tensor | None = None,
) -> None:  # fmt: skip
    """As `launch.place_latent`."""
    rotated = table.shape[1]
    angle, pairs = table[step.positions.long()], Pairs(neighbours=True)
    turned = rotate(q[..., -rotated:].float(), angle[:, None], pairs)
    out[..., -rotated:] = turned.to(out.dtype)
    latent, behind = keys.float().tensor_split((keys.shape[1] - rotated,), -1)
    both = torch.cat((rms_norm_reference(latent, norm), rotate(behind, angle, pairs)), -1)
    kept = step.slots >= 0
    page = kv.shape[2]
    blocks, places = (step.slots[kept] // page).long(), (step.slots[kept] % page).long()
    if scales is None:
        kv[blocks, 0, places] = both[kept].to(kv.dtype)
        return
    codes, of_heads = quantise_heads(both[kept], kv.dtype == torch.float8_e4m3fn)
    kv.view(torch.uint8)[blocks, 0, places] = codes
    scales[blocks, 0, places] = of_heads


def by_head_reference(
    y: Tensor, x: Tensor, arena: Tensor, site: LoraSite, step: LoraStep, *, inner: Rows, outer: Rows
) -> None:
    """As `launch.by_head`, rounded where the kernel rounds."""
    heads, inputs = x.shape[1:]

    def rows(slot: int, which: Rows, width: int) -> Tensor:
        """[heads, rank, width] in float32"""
        places = site.rows[slot, 0, which.side, : int(site.ranks[slot, 0])].long() * UNIT
        starts = which.first + which.by_head * torch.arange(heads, device=places.device)
        columns = torch.arange(width, device=places.device)
        return arena[places[None, :, None] + starts[:, None, None] + columns].float()

    for slot, first, count in step.chunks.tolist():
        tokens = step.order[first : first + count].long()
        if not count or not int(site.ranks[slot, 0]):
            continue
        low = torch.einsum("nhk,hrk->nhr", x[tokens].float(), rows(slot, inner, inputs))
        gain = torch.einsum(
            "nhr,hrk->nhk", low.to(arena.dtype).float(), rows(slot, outer, y.shape[2])
        )
        y[tokens] = (y[tokens].float() + gain).to(y.dtype)
