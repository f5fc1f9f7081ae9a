"""How long a step takes on devices that nobody here owns: a roofline with fitted factors.

A step reads the weights and what its sequences have cached, computes its prompt tokens, exchanges
activations between the ranks of tensor parallelism and starts the kernels of each layer:

    step  = max(weights·f + experts·f + cache·f, products·f) + layers·f + sync·f + link·f + rows·f
    chunk = products·f + scores·f + link·f + layers·f          of a prompt, added to the step

Each name is a time that the data sheet gives (bytes over bandwidth, operations over the peak, bytes over
the link) or a count (layers, rows), and f its factor in `factors.json`, fitted to measured points by
`python -m benchmarks.planner`. A factor of 1.25 is an efficiency of 80 %. Mixtures have their own.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.planning.devices import Device
from engine.planning.model_shape import ModelShape
from engine.planning.precision import Precision

_FILE = Path(__file__).with_name("factors.json")
_MICRO = 1e-6
SERVERS = ("vllm", "sglang", "trtllm")
_ACTIVATION = 2.0  # bytes of a value that ranks exchange


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of a replica: `tensor` × `data` × `pipeline` devices. Experts are divided over `tensor` ×
    `data` devices, whole (`expert` of them) or each in parts: a device reads the same share of them."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1  # replicas of attention in front of the same experts
    expert: int = 1

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def stage(self) -> int:
        """Devices of a stage of the pipeline."""
        return self.tensor * self.data

    @property
    def words(self) -> str:
        parts = [f"tp {self.tensor}"]
        parts += [f"pp {self.pipeline}"] * (self.pipeline > 1)
        parts += [f"dp {self.data}"] * (self.data > 1)
        parts += [f"ep {self.expert}"] * (self.expert > 1)
        return ", ".join(parts)

    def check(self, shape: ModelShape) -> None:
        """Raises ConfigError for a layout that the model's sizes do not allow."""
        for name, value in (
            ("tp", self.tensor), ("pp", self.pipeline), ("dp", self.data), ("ep", self.expert)
        ):  # fmt: skip
            if value < 1:
                raise ConfigError(f"{name} is {value}: use 1 or more")
        if shape.query_heads % self.tensor:
            raise ConfigError(
                f"tp is {self.tensor}: it must divide the {shape.query_heads} heads of "
                f"{shape.name or 'the model'}"
            )
        if self.pipeline > len(shape.layers):
            raise ConfigError(f"pp is {self.pipeline}: the model has {len(shape.layers)} layers")
        if self.expert > 1 and (not shape.experts or shape.experts % self.expert):
            raise ConfigError(
                f"ep is {self.expert}: it must divide the model's {shape.experts} experts"
            )


@dataclass(frozen=True, slots=True)
class Serving:
    """A model on devices: everything that a step's time depends on but its rows."""

    shape: ModelShape
    precision: Precision
    kv_bytes: float  # of a cached value
    device: Device
    layout: Layout
    server: str = ""  # whose overheads are taken: one of SERVERS; else their mean

    def decode_terms(self, rows: float, context: float) -> dict[str, float]:
        """Times of a step of `rows` sequences of `context` positions on average, by what takes them, in
        seconds of one device, before factors."""
        shape, layout = self.shape, self.layout
        flight = rows / layout.pipeline  # a stage works on one batch of as many as there are stages
        tensor, bandwidth = layout.tensor, self.device.bandwidth
        layers = len(shape.layers) * _MICRO
        own = self.precision.attention * shape.attention + self.precision.dense * shape.dense
        touched = shape.experts_touched(flight) / max(1, shape.experts)
        cached = flight / layout.data * shape.cached_values(context) * self.kv_bytes
        peak = self.device.peak(self.precision.multiplied_in)
        return {
            "weights": (own + self.precision.table * shape.head) / tensor / bandwidth,
            "experts": self.precision.expert
            * shape.expert_weights
            * touched
            / layout.stage
            / bandwidth,
            "cache": cached / min(tensor, shape.kv_heads) / bandwidth,
            "products": 2 * shape.active * flight / layout.stage / peak,
            "layers": layers,
            "sync": layers if tensor > 1 else 0.0,
            "spread": layers * math.log2(1 + shape.experts_touched(flight))
            if shape.experts
            else 0.0,
            "index": layers if self._indexed else 0.0,
            "link": self._exchanged(flight / layout.data),
            "rows": rows * _MICRO,
        }

    def prompt_terms(self, tokens: float, cached: float = 0.0) -> dict[str, float]:
        """Times of computing `tokens` of a prompt after `cached` ones, as above."""
        shape, layout = self.shape, self.layout
        stage = layout.stage
        peak = self.device.peak(self.precision.multiplied_in)
        scores = shape.prefill_scores(cached + tokens) - shape.prefill_scores(cached)
        return {
            f"products_{self.precision.multiplied_in}": 2 * shape.active * tokens / stage / peak,
            "scores": 2 * scores / stage / self.device.peak("bf16"),
            "prompt_link": self._exchanged(tokens) / layout.data,
            "prompt_layers": len(shape.layers) * _MICRO,
        }

    @property
    def _indexed(self) -> bool:
        """Whether an indexer chooses the keys: its cached part makes the vector longer than MLA's."""
        first = self.shape.layers[0]
        return first.heads == 1 and first.cached % 576 != 0 and first.cached > 576

    def _exchanged(self, rows: float) -> float:
        """Two all-reduces of each layer, of which a rank sends 2·(t − 1)/t of the values."""
        tensor = self.layout.tensor
        values = 2 * len(self.shape.layers) * rows * self.shape.hidden
        return values * _ACTIVATION * 2 * (tensor - 1) / tensor / self.device.link

    @property
    def kind(self) -> str:
        return "moe" if self.shape.is_mixture else "dense"

    @property
    def factors(self) -> Mapping[str, float]:
        return factors_of(self.kind, self.server)

    def decode(self, rows: float, context: float) -> dict[str, float]:
        """Seconds of a step by what takes them, factors applied; `products` and the three that are read
        from memory overlap, so a sum takes the larger (`total`)."""
        factors = self.factors
        terms = self.decode_terms(rows, context)
        return {name: seconds * factors.get(name, 0.0) for name, seconds in terms.items()}

    def decode_s(self, rows: float, context: float) -> float:
        return total(self.decode(rows, context))

    def prompt(self, tokens: float, cached: float = 0.0) -> dict[str, float]:
        factors = self.factors
        terms = self.prompt_terms(tokens, cached)
        return {name: seconds * factors.get(name, 0.0) for name, seconds in terms.items()}

    def prompt_s(self, tokens: float, cached: float = 0.0) -> float:
        """Seconds that a step takes longer for these tokens of a prompt."""
        return sum(self.prompt(tokens, cached).values())


_READ = ("weights", "experts", "cache")


def total(parts: Mapping[str, float]) -> float:
    """Of a decode step: what is read and what is multiplied overlap."""
    read = sum(parts[name] for name in _READ)
    rest = sum(
        seconds for name, seconds in parts.items() if name not in _READ and name != "products"
    )
    return max(read, parts["products"]) + rest


@cache
def _factors() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text())
    return found


def facts_of_fit() -> dict[str, Any]:
    """On what the factors were fitted, and when."""
    fit: dict[str, Any] = _factors()["fit"]
    return fit


@cache
def factors_of(kind: str, server: str) -> Mapping[str, float]:
    """Of `dense` or `moe` models; what depends on the server is that server's, or the mean of all."""
    found: dict[str, float] = {}
    for name, value in _factors()[kind].items():
        if isinstance(value, dict):
            found[name] = value.get(server, sum(value.values()) / len(value))
        else:
            found[name] = value
    return found
