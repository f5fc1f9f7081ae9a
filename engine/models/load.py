"""Loads a model: finds its directory, and chooses dtype, device and context length."""

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.backends.compiled import linear as dense
from engine.backends.compiled.group import Group
from engine.backends.compiled.linear import DTYPES
from engine.backends.layers.linear import multiplies_bfloat16
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_spec import ModelSpec, Sight
from engine.models.checkpoint import model_path, open_checkpoint
from engine.models.decoder import Decoder
from engine.models.registry import model_spec
from engine.models.shard_norms import sum_row_norms
from engine.models.sharded_source import ShardedSource
from engine.models.shares import Shard, check_groups, shards
from engine.models.usual_names import usual_names
from engine.models.weights import TensorSource, Weights


@dataclass(frozen=True, slots=True)
class LoadedModel:
    name: str
    digest: str  # of the configuration and the weights
    spec: ModelSpec  # of a rank: its part, with the vocabulary of all
    native_context: int  # the checkpoint's context length; `spec.context` is the served one
    dtype: torch.dtype
    device: torch.device
    decoder: Decoder
    bytes: int  # of the weights as they are served
    path: Path | None = None  # of the checkpoint
    shard: Shard | None = None  # of several ranks
    group: Group | None = None


def load_model(
    config: EngineConfig,
    check: Callable[[ModelSpec, Path], None] | None = None,
    group: Group | None = None,
) -> LoadedModel:
    """Raises CheckpointError naming the file at fault, ConfigError for a wrong setting.

    `check` sees the model's shape and path before its weights are read. `group`: of the ranks that have a
    part each; only this rank's is read.
    """
    path = model_path(config.model)
    checkpoint = open_checkpoint(path)
    with closing(checkpoint.source) as source:
        spec = model_spec(checkpoint.config)
        spec = replace(spec, eos=tuple(dict.fromkeys((*checkpoint.eos, *spec.eos))))
        native = spec.context
        spec = replace(spec, context=served_context(spec, config.max_context))
        device = choose_device(config.device)
        spec = replace(spec, kv_sight=_checked_sight(config, spec))
        if check is not None:
            check(spec, path)
        dtype = choose_dtype(config.dtype, source.stored_dtype(), device)
        _check_quantization(config.quantization, source)
        if config.batch_invariant:
            refuse_by_row(spec, dtype, device)
        read, shard, own = usual_names(source, spec), None, spec
        if group is not None:
            shard = _shard(config, spec, group, dtype, device)
            read, own = ShardedSource(read, shard), replace(shard.spec, vocab=len(shard.vocab))
        with closing(
            Weights(read, dtype, device, config.quantization, config.batch_invariant)
        ) as weights:
            decoder = Decoder(own, weights)
        if shard is not None and group is not None:
            sum_row_norms(decoder, shard, group)
    return LoadedModel(
        name=config.model,
        digest=_served_digest(checkpoint.digest, config.quantization, spec),
        spec=spec if shard is None else shard.spec,
        native_context=native,
        dtype=dtype,
        device=device,
        decoder=decoder,
        bytes=weights.bytes,
        path=path,
        shard=shard,
        group=group,
    )


def _shard(
    config: EngineConfig, spec: ModelSpec, group: Group, dtype: torch.dtype, device: torch.device
) -> Shard:
    """This rank's part. Raises ConfigError for what ranks do not serve."""
    if device.type != "cpu":
        raise ConfigError(f"tp is {group.size}, which is served on CPUs only: set device to cpu")
    if dtype not in DTYPES:
        raise ConfigError(
            f"tp is {group.size}: dtype {dtype} is not served, use float32 or bfloat16"
        )
    shard = shards(spec, group.size)[group.rank]
    if config.quantization in ("int8", "int4"):
        check_groups(shard, config.quantization)
    return shard


def _checked_sight(config: EngineConfig, spec: ModelSpec) -> Sight:
    """What layers without a window see. Raises ConfigError where `kv_window` cannot be served."""
    if config.kv_window is None:
        return Sight()
    if all(spec.windows):
        raise ConfigError("kv_window is set, and every layer has a window of its own: leave it out")
    if config.kv_heavy and any(spec.windows):
        raise ConfigError("kv_heavy is not served with layers that have a window: leave it out")
    return config.kv_sight_of_all


def refuse_by_row(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError naming what is not computed row by row (`batch_invariant`)."""
    experts = spec.experts
    for reason, found in (
        ("is served on a CPU only: set device to cpu", device.type != "cpu"),
        ("needs the engine's compiled kernels: install a C compiler, then this again",
         not dense.has_kernel()),
        ("needs dtype float32 or bfloat16", dtype not in dense.DTYPES),
        ("is not served with multi-head latent attention", spec.latent is not None),
        ("is not served with ALiBi", spec.alibi is not None),
        ("is not served with several residual streams", spec.streams is not None),
        ("is not served with clamped experts", experts is not None and experts.clamp is not None),
    ):  # fmt: skip
        if found:
            raise ConfigError(f"batch_invariant {reason}")


def _check_quantization(wanted: str, source: TensorSource) -> None:
    if wanted not in ("int8", "int4"):
        return
    if source.format:
        raise ConfigError(
            f"quantization is {wanted!r}, but {source.path} is stored as {source.format}: leave it "
            "at auto, or give the checkpoint in floats"
        )


def _served_digest(digest: str, quantization: str, spec: ModelSpec) -> str:
    """Keys and values depend on what the weights are rounded to, and with LongRoPE on the served
    context: another root of the cache's keys."""
    varied = [quantization] if quantization != "auto" else []
    if spec.rope.kind == "longrope":
        original = spec.rope.values["original_max_position_embeddings"]
        varied.append("long" if spec.context > original else "short")
    for each in varied:
        digest = hashlib.sha256(f"{digest}\0{each}".encode()).hexdigest()
    return digest


def choose_device(name: str) -> torch.device:
    """A CUDA device has its index, which torch and Triton need to make it the current one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device is {name!r}, but torch finds no CUDA device: use cpu")
    if device.type == "cpu":
        return torch.device("cpu")
    count, index = torch.cuda.device_count(), device.index or 0
    if index >= count:
        raise ConfigError(
            f"device is {name!r}: torch finds {count}, use cuda:0 to cuda:{count - 1}"
        )
    return torch.device("cuda", index)


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """`auto` keeps the stored dtype; on a CPU, half types become bfloat16 if the processor
    multiplies it, otherwise float32."""
    if name != "auto":
        requested: torch.dtype = getattr(torch, name)
        return requested
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


def served_context(spec: ModelSpec, requested: int | None) -> int:
    """The context length to serve: `requested`, or the model's own, extended by its rotary factor if
    its kind of scaling does that."""
    factor = spec.rope.values.get("factor") or 1.0
    longest = spec.context
    if spec.rope.kind in ("linear", "dynamic"):
        longest = int(spec.context * factor)
    elif spec.rope.kind == "yarn":
        original = spec.rope.values.get("original_max_position_embeddings") or spec.context
        longest = max(spec.context, int(original * factor))
    if requested is None:
        return longest
    if requested > longest:
        raise ConfigError(f"max_context is {requested}: the model's context length is {longest}")
    return requested
