"""The number of KV blocks in the pool."""

from pathlib import Path

import torch

from engine.backends.compiled.group import Group
from engine.backends.layers.kv import block_bytes
from engine.config import EngineConfig
from engine.errors import ConfigError, RankError
from engine.models.load import LoadedModel

_CPU_SHARE = 0.4  # of the memory that is free after the weights are loaded
_GPU_SHARE = 0.95  # of the memory that is free after the weights and what steps need


def decide_blocks(
    config: EngineConfig, model: LoadedModel, reserved: int = 0, layers: int | None = None
) -> int:
    """`num_blocks` if set, else as many as fit into `kv_memory_bytes`, else as many as fit into a
    share of the free memory without the `reserved` bytes, at most twice what all running sequences
    can fill. A block takes the memory of so many `layers`; None: of those that it has. The ranks of a
    group share the device's free memory. Raises ConfigError when fewer than two blocks fit."""
    spec, device = model.spec, model.device
    ranks = 1 if model.group is None else model.group.size
    each = block_bytes(spec, config.block_size, model.dtype, config.kv_dtype, layers)
    if config.num_blocks is not None:
        return config.num_blocks
    if config.kv_memory_bytes is not None:
        blocks = config.kv_memory_bytes // each
        setting = f"kv_memory_bytes is {config.kv_memory_bytes}"
    else:
        free = max(0, free_bytes(device) - reserved) // ranks
        useful = 2 * config.max_running * -(-spec.context // config.block_size)
        blocks = min(
            int(free * (_CPU_SHARE if device.type == "cpu" else _GPU_SHARE)) // each, useful
        )
        setting = f"{free} bytes are free after {reserved} that steps need"
    if blocks < 2:
        raise ConfigError(
            f"{setting}: 2 blocks of {config.block_size} tokens take {2 * each} bytes"
        )
    return blocks


def agreed_blocks(group: Group, digest: str, blocks: int) -> int:
    """As many as every rank has memory for. Raises RankError where a rank has another checkpoint."""
    found = group.exchange((digest, blocks))
    for rank, (other, _) in enumerate(found):
        if other != found[0][0]:
            why = (
                f"rank {rank} has checkpoint {other[:12]}, rank 0 has {found[0][0][:12]}: give all ranks "
                "the same files and settings"
            )
            group.end(why)
            raise RankError(why)
    return min(int(each) for _, each in found)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_memory(), _cgroup_memory_left())


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


def _cgroup_memory_left() -> int:
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text(encoding="ascii").strip()
        used = int((root / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)
