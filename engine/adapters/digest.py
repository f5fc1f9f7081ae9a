"""The digest that identifies an adapter, from its PEFT directory. No torch: gateways use it too."""

import hashlib
import json
from pathlib import Path
from typing import Any

from engine.errors import AdapterError
from engine.regular_files import open_regular, read_text

# Fields of PEFT's LoraConfig that change the computation in a way that is not served.
REFUSED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)


CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Fields of the configuration that change the effective weights; and those that say what the tensors
# are, which count where they are set.
_SCALING_FIELDS = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_MEANING_FIELDS = ("use_dora", "modules_to_save", *REFUSED)


def adapter_digest(directory: Path) -> str:
    """SHA-256, in hex, over the SHA-256 of the weight file and the scaling fields.

    The same weights with another alpha answer differently, so they are another adapter.
    Raises AdapterError when a file cannot be read.
    """
    config = read_config(directory)
    try:
        with open_regular(directory / WEIGHTS) as file:
            weights = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise AdapterError(
            "adapter_not_found", f"{directory / WEIGHTS} cannot be read: {error}"
        ) from None
    return digest_of(config, weights)


def digest_of(config: dict[str, Any], weights: bytes) -> str:
    """`weights` is the SHA-256 of the weight file."""
    fields = {name: config.get(name) for name in _SCALING_FIELDS}
    fields |= {name: config[name] for name in _MEANING_FIELDS if config.get(name)}
    return hashlib.sha256(weights + json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        config = json.loads(read_text(path))
    except FileNotFoundError:
        raise AdapterError(
            "adapter_not_found", f"{path} is missing: use the path of a PEFT directory"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError("invalid_adapter", f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise AdapterError("invalid_adapter", f"{path} is not a JSON object")
    return config
