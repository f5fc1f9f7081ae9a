"""Which linear layers the kernel computes among other things in one call."""

from engine.backends.compiled.linear import Gated, RowGatedLinear, RowLinear, SiteTable
from engine.backends.layers.linear import GatedLinear, Linear
from engine.backends.layers.quantised_linear import QuantizedGatedLinear, QuantizedLinear

_KINDS = (RowLinear, RowGatedLinear, QuantizedLinear, QuantizedGatedLinear)


def compiled_table(linear: Linear | GatedLinear) -> SiteTable | None:
    """None for a linear that is computed otherwise."""
    return linear.table if isinstance(linear, _KINDS) else None


def compiled_matrix(linear: Linear | GatedLinear) -> Gated | None:
    """The only matrix of a linear that the kernel computes, with its gate."""
    table = compiled_table(linear)
    return table.matrices[0] if table is not None and len(table.matrices) == 1 else None
