"""All layers of a step whose rows decode or verify guesses, in one compiled call: on few rows, calling
the operations one after the other takes longer than some of them. Their results are the same, bit for
bit."""

from dataclasses import dataclass

import torch

from engine.backends.compiled.group import Group
from engine.backends.compiled.linear import KINDS, compiled, has_kernel, multiplies
from engine.backends.compiled.pointwise import is_compiled
from engine.backends.cpu.attention_tile import can_attend
from engine.backends.cpu.packed_products import Listed, PackedLoraStep
from engine.backends.layers.any_mixture import AnyMixture
from engine.backends.layers.compiled_tables import compiled_table
from engine.backends.layers.experts import Mixture
from engine.backends.layers.kv import KvPool
from engine.backends.layers.lora import LoraStep
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import GatedSite
from engine.backends.layers.step import StepInputs
from engine.model_spec import ModelSpec
from engine.models.decoder import Block, Decoder

_MOST_ROWS = 64  # of more, a call takes less time than its work


@dataclass(frozen=True, slots=True)
class DecodedLayers:
    """Of one model and its pool."""

    spec: ModelSpec
    pool: KvPool
    blocks: list[Block]
    table: (
        torch.Tensor
    )  # the addresses that `engine/backends/compiled/layers.h` names, [layers, 10]
    group: Group | None = None

    def __call__(self, step: StepInputs, x: torch.Tensor) -> torch.Tensor | None:
        """x after all layers, changed in place; None for a step that has to be computed otherwise."""
        attention, pool, queries = self.blocks[0].attention, self.pool, step.all_rows
        tiles = queries.tiles[attention.shape.sight]
        adapters = _listed(queries.lora)
        if step.sampled is not queries or adapters is None or len(x) > _MOST_ROWS:
            return None
        if not is_compiled(x):
            return None
        places = []
        for tile in tiles:
            if not can_attend(tile, pool, attention):
                return None
            rows, keys = tile.rows, tile.gather.data_ptr()
            first = (rows.start, 0) if isinstance(rows, slice) else (0, rows.data_ptr())
            places.append((
                *first, tile.sequences, tile.queries, tile.positions, keys,
                keys + tile.gather.numel() // 2 * 8, tile.starts.data_ptr(), tile.newest.data_ptr(),
            ))  # fmt: skip
        spec, angles, shape = self.spec, step.angles[attention.rope or 0], attention.shape
        if angles.interleaved or angles.part is not None:
            return None
        compiled().layers(
            self.table.data_ptr(), len(self.blocks), x.data_ptr(),
            (angles.cos.data_ptr(), angles.sin.data_ptr(), angles.cos.stride(0)),
            step.kv_slots[0].data_ptr(),
            places,
            adapters,
            (
                len(x), spec.hidden, spec.intermediate, pool.kv_heads, pool.group, spec.head_dim,
                shape.window, pool.block_size, KINDS[spec.activation],
            ),
            spec.eps, shape.scale, shape.softcap or 0.0, x.dtype is torch.bfloat16,
            torch.get_num_threads(), *(() if self.group is None else (self.group.address,)),
        )  # fmt: skip
        if self.group is not None:
            self.group.check("a sum of the layers")
        return x


def decoded_layers(
    spec: ModelSpec, decoder: Decoder, pool: KvPool, group: Group | None = None
) -> DecodedLayers | None:
    """None for a model whose layers are not all made of what `compiled/layers.h` computes. `group`: of
    the ranks that have a part of each layer."""
    widths = spec.hidden, spec.intermediate, spec.q_width, 2 * spec.kv_width
    if not has_kernel() or any(width % 32 for width in widths) or not multiplies(pool.dtype):
        return None
    if spec.streams is not None or spec.latent is not None or spec.qkv_cap is not None:
        return None
    first = decoder.blocks[0].attention
    rows = [_addresses(block, pool) for block in decoder.blocks]
    if first.rope is None or any(
        (each.attention.shape, each.attention.rope) != (first.shape, first.rope)
        for each in decoder.blocks
    ):
        return None
    found = [row for row in rows if row is not None]
    if len(found) < len(rows) or pool.windowed is not None:
        return None
    return DecodedLayers(spec, pool, decoder.blocks, torch.tensor(found), group)


def _listed(lora: LoraStep | None) -> list[Listed] | None:
    """None for a step with adapters that change more than the products."""
    if lora is None:
        return []
    return lora.listed if isinstance(lora, PackedLoraStep) and not lora.extras else None


def _addresses(block: Block, pool: KvPool) -> list[int] | None:
    attention = block.attention
    slots = pool.slots(attention.layer)
    norms = block.input_norm, block.mlp_norm
    inner = _mlp(block) if block.mixture is None else _mixture(block.mixture)
    if block.parallel or slots is None or inner is None:
        return None
    if block.after_attention or block.after_mlp or not _is_plain(block):
        return None
    qkv, o = compiled_table(block.qkv.linear), compiled_table(block.o.linear)
    if qkv is None or o is None:
        return None
    if type(norms[0]) is not RmsNorm or type(norms[1]) is not RmsNorm:
        return None
    first, second = (each.floats.data_ptr() for each in norms if each is not None)
    of_heads = attention.head_norms or ()
    if any(type(each) is not RmsNorm for each in of_heads):
        return None
    q_norm, k_norm = [each.floats.data_ptr() for each in of_heads] or (0, 0)
    *sites, mixture = inner
    return [
        first, qkv.address, q_norm, k_norm, o.address, second, *sites, slots.data_ptr(), mixture,
    ]  # fmt: skip


def _mlp(block: Block) -> tuple[int, int, int] | None:
    if not isinstance(block.gate_up, GatedSite) or block.gate_up.cutoff:
        return None
    gate_up, down = compiled_table(block.gate_up.linear), compiled_table(block.down.linear)
    if gate_up is None or down is None:
        return None
    return gate_up.address, down.address, 0


def _mixture(mixture: AnyMixture) -> tuple[int, int, int] | None:
    if not isinstance(mixture, Mixture) or mixture.compiled is None or mixture.shared is not None:
        return None
    return 0, 0, mixture.compiled.table.data_ptr()


def _is_plain(block: Block) -> bool:
    """Whether nothing else is done to queries and keys than norms of heads and rotations."""
    each = block.attention
    extras = (each.row_norms, each.value_norm, each.alibi, each.sinks)
    return each.source == each.layer and all(extra is None for extra in extras)
