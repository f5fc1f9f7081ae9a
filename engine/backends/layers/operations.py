"""What a device does in a decoder layer. `engine.models.decoder` is the one forward pass over it;
`engine.backends.cpu.operations` (torch) and `engine.backends.gpu.operations` (kernels) implement it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from engine.backends.layers.alibi import Alibi
from engine.backends.layers.embedding import Embedding
from engine.backends.layers.linear import GatedLinear, Linear
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.streams import Ends, LayerInputs, StreamLayer
from engine.model_spec import AttentionShape

if TYPE_CHECKING:
    from engine.backends.layers.any_mixture import AnyMixture

X = TypeVar("X")  # the residual stream, in a form of the device's own
X_co = TypeVar("X_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Site:
    """A linear of one layer, which adapters may add to: `name` is one of `matrices.SITES`."""

    layer: int
    name: str
    linear: Linear


@dataclass(frozen=True, slots=True)
class GatedSite(Site):
    """The gate and up projections of one layer."""

    linear: GatedLinear
    # How many standard deviations above a row's mean its gates are cut off, to 0; None: they are not.
    cutoff: float | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """A layer's attention. Norms are for queries and keys, before the rotation: of each head, or of
    all heads together."""

    layer: int
    source: int  # the layer whose keys and values it reads: its own, or an earlier one
    shape: AttentionShape
    head_norms: tuple[RmsNorm, ...] | None
    row_norms: tuple[RmsNorm, ...] | None
    rope: int | None  # the number of the rotation of queries and keys; None: they have no positions
    alibi: Alibi | None = None
    sinks: torch.Tensor | None = None  # of each query head: a score without a key or value
    value_norm: RmsNorm | None = None  # of each head


@dataclass(frozen=True, slots=True)
class Halves:
    """The attention and the MLP of a layer, with their norms."""

    qkv: Site
    attention: Attention
    o: Site
    gate_up: GatedSite
    down: Site
    norms: tuple[RmsNorm, RmsNorm, RmsNorm, RmsNorm]  # before and after attention, then the MLP


class StreamSteps(Protocol[X_co]):
    """Streams are [rows, streams, hidden]. From the last layer with keys of its own on, rows may be the
    sampled ones alone."""

    embedded: torch.Tensor  # [tokens, hidden]

    def inputs(self, given: LayerInputs) -> torch.Tensor:
        """Each layer's own input: [tokens, layers, size]."""

    def begin(self, ends: Ends) -> torch.Tensor:
        """The streams of the embedded tokens."""

    def predict(
        self, layer: StreamLayer, x: torch.Tensor, norm: RmsNorm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The predicted streams, and the norm of the active one: [rows, hidden]."""

    def attention(self, block: Halves, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of the normed rows `h`: the output before its product [kept, heads * head_dim], and which rows
        go on; None: all."""

    def change(
        self,
        layer: StreamLayer,
        block: Halves,
        y: torch.Tensor,
        predicted: torch.Tensor,
        h: torch.Tensor,
    ) -> torch.Tensor:
        """The streams, corrected by what attention's output `y` and the MLP change. `h`: the normed rows
        that attention read."""

    def add_input(self, layer: StreamLayer, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """The streams with the layer's own input [rows, size]; perhaps added by what reads them next."""

    def end(self, ends: Ends, x: torch.Tensor) -> X_co:
        """The one residual stream of the streams of the last layer."""


class Operations(Protocol[X]):
    """The operations of one step. Products include the site's bias and the step's adapters."""

    def embed(self, table: Embedding, scale: float, norm: RmsNorm | None) -> X:
        """The rows of `table` for the step's tokens, times `scale`, and normed if `norm` is given."""

    def streams(self, x: X) -> StreamSteps[X]:
        """Of a model with several residual streams, whose embedded tokens are `x`."""

    def project(self, site: Site, x: X, norm: RmsNorm | None) -> torch.Tensor:
        """norm(x) W^T: [tokens, out]; x W^T without a norm."""

    def attend(self, attention: Attention, qkv: torch.Tensor, x: X) -> tuple[torch.Tensor, X]:
        """Writes keys and values, and returns the attention's output [rows, heads * head_dim] with
        the residual stream of these rows: in the last layer perhaps only the sampled ones."""

    def gate(self, site: GatedSite, x: X, norm: RmsNorm | None) -> torch.Tensor:
        """activation(gate) * up of norm(x) W^T, whose columns are the gate's, then the up part's."""

    def widen(self, site: Site, x: X, norm: RmsNorm | None) -> torch.Tensor:
        """activation(norm(x) W^T): the inner values of an MLP without a gate."""

    def add(self, site: Site, y: torch.Tensor, x: X, norm: RmsNorm | None) -> X:
        """x + y W^T; the product is normed first if `norm` is given. May change `x`."""

    def mix(self, mixture: "AnyMixture", x: X, norm: RmsNorm | None) -> X:
        """x + the mixture of experts of norm(x), which is of this device."""

    def logits(self, head: Linear, x: X, norm: RmsNorm) -> torch.Tensor:
        """norm(x) W^T of the sampled rows, before the model's scale and soft cap: [sampled, vocab]."""
