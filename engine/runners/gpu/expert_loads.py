"""How many rows each expert has computed on a GPU: counted there, copied back with a step's results."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from engine.backends.layers.device.mixture import DeviceMixture
from engine.models.decoder import Decoder
from engine.runners.gpu.cuda_graphs import Recorded


class ExpertRows(Mapping[int, list[int]]):
    """By layer, as the last step that was read has them."""

    def __init__(self, layers: list[int], loads: Tensor) -> None:
        self._layers = {layer: number for number, layer in enumerate(layers)}
        self.loads = loads  # [layers, experts], on the host

    def __getitem__(self, layer: int) -> list[int]:
        found: list[int] = self.loads[self._layers[layer]].tolist()
        return found

    def __iter__(self) -> Iterator[int]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


class ExpertLoads:
    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        mixtures = [
            block.mixture for block in decoder.blocks if isinstance(block.mixture, DeviceMixture)
        ]
        count = max((each.count for each in mixtures), default=0)
        self._device = torch.zeros(len(mixtures), count, dtype=torch.int64, device=device)
        for mixture, load in zip(mixtures, self._device, strict=True):
            mixture.load = load
        host = torch.zeros(self._device.shape, dtype=torch.int64, device="cpu")
        self.rows = ExpertRows([each.layer for each in mixtures], host)

    def uncounted(
        self, record: Callable[[Callable[[], Tensor]], Recorded], function: Callable[[], Tensor]
    ) -> Recorded:
        """What `record` makes of a step. To record one runs it, and the replay that follows counts."""
        before = self._device.clone()
        made = record(function)
        self._device.copy_(before)
        return made

    def copied(self) -> Tensor | None:
        """A copy on the host, complete once the device has done all work launched so far."""
        if not self._device.numel():
            return None
        if self._device.device.type != "cuda":
            return self._device.clone()
        host = torch.empty(self._device.shape, dtype=torch.int64, pin_memory=True)
        return host.copy_(self._device, non_blocking=True)

    def keep(self, loads: Tensor) -> None:
        self.rows.loads = loads
