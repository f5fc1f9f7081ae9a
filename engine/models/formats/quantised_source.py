"""A checkpoint of which a part of the matrices is quantised."""

import torch

from engine.backends.layers.packed import GROUP, LANES
from engine.errors import CheckpointError
from engine.models.formats.safetensors_source import SafetensorsSource

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class QuantisedSource(SafetensorsSource):
    """What the formats have in common."""

    def stored_dtype(self) -> torch.dtype:
        """Of what is not quantised."""
        name = next((each for each in self._files if each.endswith("norm.weight")), None)
        found = self.raw(name).dtype if name is not None else None
        return found if found in _FLOATS else torch.float32

    def needed(self, name: str) -> torch.Tensor:
        """As it is stored. Raises CheckpointError where it is missing."""
        if name not in self._files:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return self.raw(name)

    def check_group(self, name: str, group: int, width: int) -> int:
        """The inputs of a group as the products count them, where all may share one."""
        if group == width:
            return -(-width // GROUP) * GROUP
        if group != LANES and group % GROUP:
            raise CheckpointError(
                f"{self.place(name)} has groups of {group}: 16 or a multiple of 32 are computed"
            )
        return group

    def order(self, name: str, width: int, group: int) -> torch.Tensor | None:
        """The inputs by the groups that the tensor `name` [in] gives them; None where they are in order,
        or where it is not there."""
        if name not in self._files:
            return None
        index, in_order = self.raw(name), torch.arange(width) // group
        if index.shape != (width,) or index.is_floating_point():
            raise CheckpointError(
                f"{self.place(name)} is {index.dtype} {list(index.shape)}: the group of each "
                f"of {width} inputs is needed"
            )
        if torch.equal(index.long(), in_order):
            return None
        order = torch.argsort(index, stable=True)
        if not torch.equal(index[order].long(), in_order):
            raise CheckpointError(
                f"{self.place(name)} does not have {group} inputs in each of "
                f"{width // group} groups"
            )
        return order
