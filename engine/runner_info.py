"""What a runner tells of itself and its model."""

import uuid

from engine.config import EngineConfig
from engine.models.load import LoadedModel
from engine.protocol import EngineInfo


def engine_info(config: EngineConfig, model: LoadedModel, blocks: int) -> EngineInfo:
    """A new id each time: call it once for a runner."""
    spec = model.spec
    return EngineInfo(
        engine_id=uuid.uuid4().hex,
        model=model.name,
        base_digest=model.digest,
        context_length=spec.context,
        vocab_size=spec.vocab,
        block_size=config.block_size,
        num_blocks=blocks,
        eos_token_ids=spec.eos,
        dtype=str(model.dtype).removeprefix("torch."),
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )
