"""What a group of ranks does not serve: each is refused by its name before anything is loaded."""

from engine.backends.compiled.group import MOST_RANKS, check_ranks
from engine.config import EngineConfig
from engine.errors import ConfigError


def check_limits(config: EngineConfig) -> None:
    """Raises ConfigError, which names the setting."""
    check_ranks()
    if config.tp > MOST_RANKS:
        raise ConfigError(f"tp is {config.tp}: use at most {MOST_RANKS}")
    for name, given in (
        ("draft_model", config.draft_model is not None),
        ("draft_heads", config.draft_heads not in ("auto", "none")),
        ("kv_heavy", bool(config.kv_heavy)),
        ("tier_ram_bytes", bool(config.tier_ram_bytes)),
        ("tier_disk", config.tier_disk is not None),
        ("tier_remote", config.tier_remote is not None),
    ):
        if given:
            raise ConfigError(f"{name} is set and tp is {config.tp}: leave one of them out")
    if config.device.startswith("cuda"):
        raise ConfigError(
            f"device is {config.device!r} and tp is {config.tp}: ranks are served on CPUs, set device "
            "to cpu or tp to 1"
        )
