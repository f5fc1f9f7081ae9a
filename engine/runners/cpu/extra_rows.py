"""Which rows of a step have adapters that change more than sums of low rank."""

from collections.abc import Mapping

from engine.backends.layers.adapter_extras import AdapterExtras, ExtraRows
from engine.batch import Row

NOT_BY_ROW = "with batch_invariant, DoRA, experts, the token table and the head have no adapters"


def extra_rows(rows: list[Row], by_slot: Mapping[int, AdapterExtras]) -> list[ExtraRows]:
    """Neighbouring rows of one adapter are one item. `by_slot`: of the device's slots."""
    found: list[ExtraRows] = []
    first = 0
    for row in rows if by_slot else ():
        end = first + len(row.tokens)
        extras = None if row.adapter is None else by_slot.get(row.adapter.slot)
        if extras is not None:
            last = found[-1] if found else None
            if last is not None and last.extras is extras and last.rows.stop == first:
                found[-1] = ExtraRows(slice(last.rows.start, end), extras)
            else:
                found.append(ExtraRows(slice(first, end), extras))
        first = end
    return found
