"""Builds the mixtures of experts of a checkpoint."""

from engine.backends.layers.any_mixture import AnyMixture
from engine.backends.layers.device.mixture import DeviceMixture
from engine.backends.layers.experts import ClampedMlp, Mixture, Mlp, SharedMlp
from engine.backends.layers.routing import Router
from engine.model_spec import ExpertsSpec, ModelSpec
from engine.models.device_experts import device_experts
from engine.models.linears import Matrix, gated_linear, linear
from engine.models.weights import Weights


def mixture(spec: ModelSpec, experts: ExpertsSpec, layer: int, weights: Weights) -> AnyMixture:
    """`layer`: the number of the decoder layer. Router and gate of the shared expert stay floats.

    Raises CheckpointError naming the tensor that is missing or of another shape.
    """
    hidden, root = spec.hidden, f"{spec.root}.layers.{layer}.{experts.module}"
    shared: Mlp | SharedMlp | None = None
    if experts.shared:
        name = f"{root}.{experts.shared_name}"
        shared = mlp = _mlp(spec, name, experts.shared, _USUAL, weights)
        if experts.shared_gate:
            gate = weights.take(f"{name}_gate.weight", (1, hidden))
            shared = SharedMlp(mlp, gate.double(), weights.by_row)
    ranking = _router(spec, experts, root, weights)
    if weights.on_device:
        stored = [f"{root}.experts.{number}" for number in range(experts.count)]
        pair = device_experts(spec, experts, stored, weights)
        return DeviceMixture(layer, ranking, *pair, shared, experts.active, experts.clamp)
    each = [
        _mlp(spec, f"{root}.experts.{number}", experts.intermediate, experts.names, weights)
        for number in range(experts.count)
    ]
    if experts.clamp is not None:
        each = [ClampedMlp(one.gate_up, one.down, *experts.clamp) for one in each]
    return Mixture(ranking, each, shared, experts.active, layer)


def _router(spec: ModelSpec, experts: ExpertsSpec, root: str, weights: Weights) -> Router:
    router = f"{root}.{experts.router}"
    count, correction = (experts.count,), None
    if experts.sigmoid:
        correction = weights.take(f"{router}.e_score_correction_bias", count)
    weight = weights.take(f"{router}.weight", (experts.count, spec.hidden))
    bias = weights.take_optional(f"{router}.bias", count)
    return Router(experts, weight, bias, correction, weights.by_row, on_device=weights.on_device)


_USUAL = "gate_proj", "up_proj", "down_proj"


def _mlp(
    spec: ModelSpec, root: str, size: int, names: tuple[str, str, str], weights: Weights
) -> Mlp:
    gate, up = (Matrix(f"{root}.{name}", spec.hidden, size) for name in names[:2])
    down = Matrix(f"{root}.{names[2]}", size, spec.hidden)
    few = not weights.on_device
    inner = gated_linear(weights, gate, up, few_rows=few)
    return Mlp(inner, linear(weights, [down], few_rows=few))
