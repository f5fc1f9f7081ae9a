"""A checkpoint by the names and shapes that Llama's has, whatever the family stores."""

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.formats.safetensors_source import SafetensorsSource
from engine.models.fused_source import FusedSource
from engine.models.stacked_experts import StackedExperts
from engine.models.weights import TensorSource


def usual_names(source: TensorSource, spec: ModelSpec) -> TensorSource:
    """Raises CheckpointError where the family's form is not read from this kind of file."""
    if spec.fused or spec.renamed:
        return FusedSource(source, spec)
    if spec.experts is not None and spec.experts.stacked:
        if not isinstance(source, SafetensorsSource):
            raise CheckpointError(f"{source.path}: experts in one tensor are read from safetensors")
        return StackedExperts(source, spec.experts)
    return source
