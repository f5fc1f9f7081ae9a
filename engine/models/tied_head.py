"""Whether the matrix of the logits is the token table."""

import torch

from engine.errors import CheckpointError
from engine.model_spec import ModelSpec
from engine.models.weights import TensorSource


def head_is_table(spec: ModelSpec, source: TensorSource, table: str = "") -> bool:
    """As transformers: a head that is stored is used, whatever the configuration says. Raises
    CheckpointError where there is none, and the configuration does not say that the table is it.
    `table`: its name, where that is not Llama's."""
    if spec.head not in source:
        if not spec.tied:
            raise CheckpointError(
                f"{source.path}: tensor {spec.head} is missing, and config.json does not set "
                "tie_word_embeddings: add the tensor, or set tie_word_embeddings to true if the "
                "token table is the head"
            )
        return True
    if not spec.tied:
        return False
    table = table or f"{spec.root}.embed_tokens.weight"
    if table not in source:
        return False  # refused where it is read
    if source.shape(table) != source.shape(spec.head):
        return False  # refused where the head is read
    return torch.equal(source.read(table, torch.float32), source.read(spec.head, torch.float32))
