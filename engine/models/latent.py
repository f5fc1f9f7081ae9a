"""Builds multi-head latent attention of a checkpoint."""

from engine.backends.layers.latent import LatentOutput, LatentQkv
from engine.backends.layers.linear import Linear
from engine.backends.layers.norm import RmsNorm
from engine.model_spec import LatentSpec, ModelSpec
from engine.models.linears import Matrix, linear
from engine.models.weights import Weights

_EPS = 1e-6  # of the norms of both small vectors, whatever the configuration says of the others


def latent_attention(
    spec: ModelSpec, latent: LatentSpec, root: str, weights: Weights
) -> tuple[LatentQkv, LatentOutput]:
    """root: the name of the attention. The products with the latent vector stay floats."""

    def matrix(name: str, width: int, out: int) -> Linear:
        return linear(weights, [Matrix(f"{root}.{name}", width, out)])

    def norm(name: str, size: int) -> RmsNorm:
        return RmsNorm(weights.take(f"{root}.{name}.weight", (size,)), _EPS)

    heads, rank = spec.heads, latent.latent
    width = heads * (latent.plain + latent.rotated)
    queries: list[Linear | RmsNorm] = [matrix("q_proj", spec.hidden, width)] if not latent.query else [
        matrix("q_a_proj", spec.hidden, latent.query),
        norm("q_a_layernorm", latent.query),
        matrix("q_b_proj", latent.query, width),
    ]  # fmt: skip
    keys = matrix("kv_a_proj_with_mqa", spec.hidden, rank + latent.rotated)
    both = weights.take(
        f"{root}.kv_b_proj.weight", (heads * (latent.plain + latent.value), rank)
    ).view(heads, -1, rank)
    key, value = both.tensor_split((latent.plain,), 1)
    qkv = LatentQkv(latent, queries, keys, norm("kv_a_layernorm", rank), key.contiguous())
    output = matrix("o_proj", heads * latent.value, spec.hidden)
    return qkv, LatentOutput(latent, value.transpose(1, 2).contiguous(), output)
