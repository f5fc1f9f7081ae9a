"""The engine's settings, validated on construction."""

from dataclasses import dataclass, fields

from engine.errors import ConfigError
from engine.model_spec import Sight

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUANTIZATIONS = ("auto", "none", "int8", "int4")
KV_DTYPES = ("auto", "int8", "fp8")
FAIRNESS = ("vtc", "fcfs")
SPECULATION = ("auto", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes are in tokens unless the name says bytes, blocks or seconds."""

    model: str  # a directory in Hugging Face layout, a .gguf file, or a hub id
    dtype: str = "auto"  # auto, float32, bfloat16 or float16
    quantization: str = "auto"  # auto: as the checkpoint is stored; none, int8 or int4
    kv_dtype: str = "auto"  # keys and values: auto, as computed; int8 or fp8
    kv_window: int | None = None  # last positions that layers without a window see; None: all
    kv_sinks: int = 4  # attention sinks: first positions always attended to
    kv_heavy: int = 0  # positions of a prompt kept by attention mass (SnapKV)
    batch_invariant: bool = False  # logits do not depend on the rest of the batch; on a CPU
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    threads: int | None = None  # CPU threads; None: one per physical core

    tp: int = 1  # ranks, each with a part of every layer (tensor parallelism); on a CPU
    compare_ranks: bool = False  # whether ranks compare their residual streams in each step

    block_size: int = 16  # tokens in a block of KV
    num_blocks: int | None = None  # blocks in the pool; overrides kv_memory_bytes
    kv_memory_bytes: int | None = None  # size of the pool; None: a share of the free memory
    max_context: int | None = None  # longest sequence; None: the model's context length

    max_batch_tokens: int = 2048  # tokens in one step; the command line uses 512 without a GPU
    step_s: float = 0.5  # aim for a step's seconds, to which its tokens are cut; 0: no aim
    max_running: int = 64  # sequences in one step
    max_waiting: int = 1024  # sequences queued before requests are refused
    max_waiting_per_tenant: int = 512  # the same limit for one tenant

    enable_lora: bool = True  # whether adapters can be loaded
    max_adapter_slots: int = 64  # adapters on the device at once; their memory is in the pool
    max_lora_rank: int = 256  # adapters of a higher rank are refused
    host_adapter_bytes: int = 4 << 30  # host memory for adapter weights
    adapter_drain_s: float = 2.0  # how long a request waits before a slot is drained for it

    prefix_cache: bool = True  # whether computed blocks are kept for later prompts
    public_prefixes: tuple[tuple[int, ...], ...] = ()  # token ids that all tenants may share
    cache_floor_blocks: int = 0  # cached blocks of a tenant that other tenants cannot evict
    cache_cap_blocks: int | None = None  # most idle cached blocks that a tenant may keep

    tier_ram_bytes: int = 0  # copies of cached blocks in host memory; 0: none
    tier_disk: str | None = None  # folder of encrypted copies, found again after a restart
    tier_disk_bytes: int = 16 << 30  # most bytes of them
    tier_remote: str | None = None  # redis:// or s3:// URL of encrypted copies that engines share
    tier_key_file: str | None = None  # 32 bytes in hex, for the copies on disk and remote
    tier_ttl_s: float = 604_800.0  # how long a copy that is not used is kept
    tier_wait_s: float = 1.0  # longest wait of a prompt for its copies before it is computed

    fairness: str = "vtc"  # vtc (virtual token counters) or fcfs (first come, first served)
    prompt_price: float = 1.0  # fairness units for one computed prompt token
    cached_price: float = 0.05  # fairness units for one cached prompt token
    output_price: float = 2.0  # fairness units for one generated token
    locality_quantum: float = 4096.0  # fairness units a tenant may run ahead for a longer prefix

    share_wait_s: float = 0.1  # a tenant below its share waits so long before others give way

    speculation: str = "auto"  # auto: verify guessed tokens where that is faster; off: never guess
    draft_model: str | None = None  # a smaller model of the same tokenizer that guesses, on a CPU
    draft_heads: str = "auto"  # heads that guess: a folder, none, or auto: in the model's folder
    overlap: bool | None = None  # launch a step before the last is read; None: the runner decides
    listen: str = "tcp://127.0.0.1:0"  # address for gateways: tcp:// or ipc://
    server_key_file: str | None = None  # CURVE certificate of this engine, with its secret key
    client_keys_file: str | None = None  # public keys of the allowed gateways, one per line
    metrics_port: int | None = None  # port of /metrics and the probes; 0: a free one, None: off
    metrics_socket: str | None = None  # path of a Unix socket with the same pages
    receipts_file: str | None = None  # keeps receipts across restarts; short form: `--receipts`
    receipts_days: float = 7.0  # acknowledged receipts stay in the file for so long after a restart
    receipts_kept: int = 100_000  # most receipts kept while they wait for an acknowledgement
    heartbeat_s: float = 1.0  # interval between load reports to each gateway
    gateway_timeout_s: float = 10.0  # a connection that is silent for so long ends its requests
    gateway_stall_s: float = 120.0  # so does a gateway that only its connection keeps alive
    stall_s: float = 60.0  # a step that takes longer is a hang, which ends the process; 0: never

    def __post_init__(self) -> None:
        _check(self)

    @property
    def kv_sight(self) -> Sight:
        """What layers without a window of their own see; with `kv_heavy`, what answers see besides kept
        positions."""
        return Sight() if self.kv_window is None else Sight(self.kv_window, self.kv_sinks)

    @property
    def kv_sight_of_all(self) -> Sight:
        """What each query sees, those of prompts too, in layers without a window of their own."""
        return Sight() if self.kv_heavy else self.kv_sight


# Settings that may be 0; all other numbers must be above 0.
_MAY_BE_ZERO = {
    "kv_sinks",
    "kv_heavy",
    "cache_floor_blocks",
    "prompt_price",
    "cached_price",
    "output_price",
    "locality_quantum",
    "share_wait_s",
    "stall_s",
    "adapter_drain_s",
    "metrics_port",
    "step_s",
    "tier_ram_bytes",
}


def _check(config: EngineConfig) -> None:
    if not config.model:
        raise ConfigError("model is empty: set a checkpoint directory, a .gguf file or a hub id")
    if config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}: use one of {', '.join(DTYPES)}")
    if config.quantization not in QUANTIZATIONS:
        raise ConfigError(
            f"quantization is {config.quantization!r}: use one of {', '.join(QUANTIZATIONS)}"
        )
    if config.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype is {config.kv_dtype!r}: use one of {', '.join(KV_DTYPES)}")
    if config.fairness not in FAIRNESS:
        raise ConfigError(f"fairness is {config.fairness!r}: use one of {', '.join(FAIRNESS)}")
    if config.speculation not in SPECULATION:
        names = ", ".join(SPECULATION)
        raise ConfigError(f"speculation is {config.speculation!r}: use one of {names}")
    if config.draft_model is not None and config.speculation == "off":
        raise ConfigError("draft_model is set and speculation is off: leave one of them out")
    named = config.draft_heads not in ("auto", "none")
    if named and (config.speculation == "off" or config.draft_model is not None):
        other = "speculation is off" if config.speculation == "off" else "so is draft_model"
        raise ConfigError(f"draft_heads is set and {other}: leave one of them out")
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if field.name in _MAY_BE_ZERO and not value >= 0:
            raise ConfigError(f"{field.name} is {value}: it must not be negative")
        if field.name not in _MAY_BE_ZERO and not value > 0:
            instead = ", or left out" if field.default is None else ""
            raise ConfigError(f"{field.name} is {value}: it must be above 0{instead}")
    if config.batch_invariant and config.kv_sight.first:
        raise ConfigError(
            f"batch_invariant is not served with kv_sinks ({config.kv_sinks}): set kv_sinks to 0, or "
            "leave out one of batch_invariant and kv_window"
        )
    _check_heavy(config)
    if config.max_running > config.max_batch_tokens:
        raise ConfigError(
            f"max_running ({config.max_running}) is above max_batch_tokens "
            f"({config.max_batch_tokens}): every running sequence takes a token of each step"
        )
    if config.gateway_timeout_s <= config.heartbeat_s:
        raise ConfigError("gateway_timeout_s must be longer than heartbeat_s: raise it")
    if config.gateway_stall_s <= config.heartbeat_s:
        raise ConfigError("gateway_stall_s must be longer than heartbeat_s: raise it")
    cap = config.cache_cap_blocks
    if cap is not None and cap < config.cache_floor_blocks:
        raise ConfigError(f"cache_cap_blocks ({cap}) is below cache_floor_blocks: raise it")


def _check_heavy(config: EngineConfig) -> None:
    if not config.kv_heavy:
        return
    for fault, instead in (
        (config.kv_window is None, "kv_window is not: set it, or leave kv_heavy out"),
        (
            config.kv_heavy < config.block_size,
            f"a block has {config.block_size} positions: raise it",
        ),
        (config.batch_invariant, "so is batch_invariant: leave one of them out"),
    ):
        if fault:
            raise ConfigError(f"kv_heavy is set ({config.kv_heavy}), and {instead}")
