"""The engine processes that `serve` starts on this machine; all gateway processes share them."""

import json
import logging
import secrets
import shutil
import tempfile
import time
from pathlib import Path

from core.errors import SettingError, Unavailable
from core.settings import Settings
from gateway.catalog.model_files import model_name
from gateway.catalog.model_source import locate_configured, locate_draft
from gateway.engines.local import EngineOptions, EngineProcess

log = logging.getLogger("tollhouse.engine")
_LOG_EVERY_S = 10.0


def tier_options(settings: Settings, slot: int) -> tuple[str, ...]:
    """The engine's options for copies of cached prompts. The key of those that leave its memory is
    made at first use."""
    options: list[str] = []
    if settings.kv_tier_ram_mb:
        options += ["--tier-ram-bytes", str(settings.kv_tier_ram_mb << 20)]
    if settings.kv_tier_disk_mb:
        options += ["--tier-disk", str(settings.data_dir / "kv-tier" / f"engine-{slot}")]
        options += ["--tier-disk-bytes", str(settings.kv_tier_disk_mb << 20)]
    if settings.kv_tier_s3_url and settings.kv_tier_redis_url:
        raise SettingError(
            "TOLLHOUSE_KV_TIER_S3_URL and TOLLHOUSE_KV_TIER_REDIS_URL are both set.",
            next_step="Leave one of them out: engines have one remote store of cached prompts.",
        )
    remote = settings.kv_tier_s3_url or settings.kv_tier_redis_url
    if remote:
        options += ["--tier-remote", remote]
    if settings.kv_tier_disk_mb or remote:
        path = settings.data_dir / "kv-tier.key"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(32), encoding="ascii")
        options += ["--tier-key-file", str(path)]
    return tuple(options)


class LocalEngines:
    def __init__(self, settings: Settings) -> None:
        # A short path: a Unix socket's path is limited to about 100 characters.
        self._socket_dir = Path(tempfile.mkdtemp(prefix="tollhouse-"))
        self._settings = settings
        model, draft = locate_configured(settings), locate_draft(settings)
        self.processes = [
            EngineProcess(
                EngineOptions(
                    model=str(model),
                    address=f"ipc://{self._socket_dir}/engine-{slot}.sock",
                    receipts=settings.data_dir / "receipts" / f"engine-{slot}.log",
                    dtype=settings.dtype,
                    quantization=settings.quantization,
                    kv_dtype=settings.kv_dtype,
                    kv_window=settings.kv_window,
                    kv_sinks=settings.kv_sinks,
                    kv_heavy=settings.kv_heavy,
                    batch_invariant=settings.batch_invariant,
                    tp=settings.tp,
                    draft_model=draft,
                    draft_heads=settings.draft_heads,
                    kv_memory_mb=settings.kv_memory_mb,
                    extra=tier_options(settings, slot),
                )
            )
            for slot in range(settings.engines)
        ]

    def upstreams(self) -> str:
        """A value of TOLLHOUSE_UPSTREAMS that names these engines, for the gateway processes."""
        return json.dumps(
            [
                {"url": each.options.address, "name": f"local-{slot}"}
                for slot, each in enumerate(self.processes)
            ]
        )

    def start(self) -> None:
        for each in self.processes:
            each.start()

    def wait_ready(self, timeout_s: float = 1800.0) -> float:
        """Wait for all engines; returns the seconds it took. Raises Unavailable if one fails."""
        began = time.monotonic()
        for each in self.processes:
            while not each.wait_ready(_LOG_EVERY_S):
                waited = time.monotonic() - began
                if each.problem:
                    raise Unavailable(
                        f"The engine cannot start: {each.problem}",
                        next_step=f"Check {_named(self._settings)}, and see the engine's log above.",
                    )
                if waited > timeout_s:
                    raise Unavailable(
                        f"The engine was not ready after {waited:.0f} s.",
                        next_step="See the engine's log above.",
                    )
                log.info("loading %s for %.0f s so far", model_name(self._settings), waited)
        return time.monotonic() - began

    def stop(self) -> None:
        for each in self.processes:
            each.stop()
        shutil.rmtree(self._socket_dir, ignore_errors=True)


def _named(settings: Settings) -> str:
    names = ["TOLLHOUSE_MODEL"]
    names += ["TOLLHOUSE_DRAFT_MODEL"] if settings.draft_model else []
    names += ["TOLLHOUSE_DRAFT_HEADS"] if settings.draft_heads not in ("auto", "none") else []
    return " and ".join(names)
