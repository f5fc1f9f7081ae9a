"""What fits: weights, adapters and cached values against the memory of a replica's devices."""

from dataclasses import dataclass

from engine.planning.model_shape import ModelShape
from engine.planning.step_times import Serving

USABLE = 0.90  # of a device's memory, as servers take it by default
_OF_ATTENTION, _OF_MLP = 4, 3  # matrices of a layer
_WORK = 2e9  # bytes of a device for activations, graphs and the runtime


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters of one rank over all projections of attention and MLP."""

    count: int = 0
    rank: int = 16

    def values(self, shape: ModelShape) -> int:
        """Parameters of one: rank × (inputs + outputs) of each matrix, one side of which is the hidden
        size. Experts have none."""
        sides = sum(layer.attention + layer.dense for layer in shape.layers) / shape.hidden
        matrices = sum(_OF_ATTENTION + _OF_MLP * (layer.dense > 0) for layer in shape.layers)
        return round(self.rank * (sides + matrices * shape.hidden))


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a whole replica, and how many sequences fit."""

    usable: float
    weights: float
    adapters: float
    work: float
    kv_per_token: float  # while no window is full, copies of replicated key heads included
    kv_per_request: float
    kv_shared: float  # of a prefix that all requests share

    @property
    def for_cache(self) -> float:
        return self.usable - self.weights - self.adapters - self.work - self.kv_shared

    @property
    def fits(self) -> bool:
        return self.for_cache >= self.kv_per_request

    @property
    def sequences(self) -> float:
        """Of that length, that fit at the same time."""
        return max(0.0, self.for_cache / self.kv_per_request) if self.kv_per_request else 0.0


def memory_of(
    serving: Serving, tokens: float, shared: float = 0.0, adapters: Adapters | None = None
) -> Memory:
    """`tokens`: positions of a request at its end; `shared`: of its prompt that every request has."""
    shape, layout = serving.shape, serving.layout
    copies = max(1.0, layout.tensor / shape.kv_heads)  # of key heads that do not divide further
    each = serving.kv_bytes * copies
    weights = serving.precision.weight_bytes(shape)
    # Attention and tables stand in each of its data-parallel replicas.
    own = serving.precision.attention * shape.attention + serving.precision.dense * shape.dense
    own += serving.precision.table * shape.head * (1 if shape.tied else 2)
    held = weights + own * (layout.data - 1)
    of_adapters = 0.0
    if adapters is not None and adapters.count:
        of_adapters = 2.0 * adapters.count * adapters.values(shape) * layout.data
    whole, prefix = shape.cached_values(tokens) * each, shape.cached_values(shared) * each
    if not shared:
        prefix = 0.0
    return Memory(
        usable=USABLE * serving.device.memory * layout.devices,
        weights=held,
        adapters=of_adapters,
        work=_WORK * layout.devices,
        kv_per_token=shape.cached_per_token * each,
        kv_per_request=whole - prefix,
        kv_shared=prefix * layout.data,
    )
