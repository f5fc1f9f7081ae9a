"""Every knob, typed, with its unit and default, read once. A wrong value stops the start.

Values come from the environment (`TOLLHOUSE_*`) and from the file that `TOLLHOUSE_ENV_FILE` names
(default `tollhouse.env` where it exists); the environment wins.
"""

import difflib
import os
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from core.errors import SettingError

PREFIX = "TOLLHOUSE_"
# Read by tests, benchmarks and the settings file itself, not by the product.
_OTHER_NAMES = ("ENV_FILE", "SPECS_DIR", "BENCH_HOME", "MODERATION_DATA", "TEST_", "DEBUG")


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    workers: int = Field(1, ge=1, le=256, description="Gateway processes on this machine.")
    pin_workers: bool = Field(
        False,
        description="Each gateway process keeps to one core of those it may use (worker i to core "
        "i from the last), which keeps its threads from handing the interpreter across cores. Leave "
        "it off where several houses share a machine: they would choose the same cores.",
    )
    data_dir: Path = Field(Path("./data"), description="Where the spool and embedded data lie.")
    database_url: str = Field(
        "", description="SQLAlchemy address; empty is a SQLite file in the data directory."
    )
    redis_url: str = Field(
        "", description="Redis (or redis+cluster://) for counters; empty: memory."
    )
    broker_url: str = Field(
        "", description="Celery's broker (amqp:// or redis://); empty runs tasks in-process."
    )
    model: str = Field(
        "", description="Directory in Hugging Face layout, or a hub id; empty is the demo model."
    )
    model_name: str = Field("", description="Public name of the model; empty is the directory's.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Arithmetic of the engine."
    )
    adapter_dirs: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="Colon-separated directories from which lora_path may load."
    )
    upstreams: str = Field(
        "",
        description="Engines to route to: addresses split by commas or spaces (tcp://, ipc://, "
        "http://), or a JSON list of objects, or the path of a JSON file; empty spawns a local "
        "engine.",
    )
    engines: int = Field(1, ge=1, le=64, description="Local engine processes to spawn.")
    kv_memory_mb: int = Field(0, ge=0, description="KV cache of a local engine in MiB; 0 chooses.")
    engine_public_key: str = Field("", description="CURVE public key of remote engines (Z85).")
    engine_secret_key_file: Path | None = Field(
        None, description="File with this side's CURVE key pair for engine sockets."
    )
    admin_token: str = Field("", description="Operator's token; empty mints one at first start.")
    stripe_api_key: str = Field("", description="Stripe secret key; empty uses manual payments.")
    stripe_api_base: str = Field("", description="Stripe API address; empty is Stripe's own.")
    stripe_webhook_secret: str = Field("", description="Secret that signs Stripe's webhooks.")
    dunning: Literal["own", "stripe"] = Field(
        "own", description="Who tries a refused card again: dunning, or Stripe's Smart Retries."
    )
    limits_when_redis_down: Literal["closed", "local"] = Field(
        "closed",
        description="Rate limits without Redis: refuse, or count a local share. Money is closed.",
    )
    max_in_flight: int = Field(
        4096,
        ge=0,
        description="Requests that one gateway process runs at once; 0 is no bound. Free plans are "
        "refused from 80 % on, standard ones from 90 %, premium ones wait.",
    )
    moderation: Literal["on", "off"] = Field("on", description="Screen prompts and answers.")
    guards: str = Field(
        "",
        description="Second opinions that policies may ask: a JSON list of objects, or the path of "
        'a JSON file: {"guard": "llama-guard", "model": "a served model"} or {"guard": "remote", '
        '"url": "https://api.openai.com", "api_key": "sk-..."}.',
    )
    moderation_retention_days: int = Field(
        90, ge=1, le=3650, description="How long decisions of the screen are kept."
    )
    request_timeout_s: float = Field(600, gt=0, description="Longest life of a request, seconds.")
    fallbacks: str = Field(
        "",
        description="Models that answer where a model has no engine: small=large,other; "
        "large=other. Charged at the price of what answered; a tenant may turn it off.",
    )
    cold_start_s: float = Field(
        60,
        ge=0,
        description="Longest that a request waits for a model or an adapter that is being loaded, "
        "seconds; a stream gets keep-alives meanwhile. 0 refuses at once.",
    )
    max_body_mb: int = Field(8, ge=1, le=512, description="Largest request body, MiB.")
    max_file_mb: int = Field(200, ge=1, le=4096, description="Largest file of /v1/files, MiB.")
    batch_concurrency: int = Field(
        8,
        ge=0,
        le=1024,
        description="Lines of batches that one gateway process runs at once; 0 runs none.",
    )
    drain_timeout_s: float = Field(30, ge=0, description="Grace for streams at shutdown, seconds.")
    tracing_endpoint: str = Field(
        "",
        description="OTLP/HTTP address for OpenTelemetry spans, such as "
        "http://localhost:4318/v1/traces (needs the tracing extra); empty traces nothing.",
    )
    log_format: Literal["console", "json"] = Field("console", description="Shape of log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least.")
    smtp_url: str = Field("", description="smtp://user:password@host:port for alerts; empty: none.")
    webhook_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="Private networks (CIDR, comma-separated) that tenants' webhooks may reach."
    )
    public_url: str = Field("", description="Address that links in mails and pages begin with.")
    oidc_issuer: str = Field("", description="OpenID Connect issuer for single sign-on.")
    oidc_client_id: str = Field("", description="OpenID Connect client id.")
    oidc_client_secret: str = Field("", description="OpenID Connect client secret.")
    export_dir: Path | None = Field(
        None, description="Scheduled exports; empty is `exports` in the data directory."
    )
    export_store_url: str = Field(
        "",
        description="Address of the S3-compatible store of scheduled exports; empty is AWS's own.",
    )

    @field_validator("adapter_dirs", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(Path(part) for part in value.split(":") if part)
        return value

    @field_validator("webhook_networks", mode="before")
    @classmethod
    def _split_networks(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(str(ip_network(part.strip())) for part in value.split(",") if part.strip())
        return value

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'tollhouse.db'}"


def load_settings(**overrides: object) -> Settings:
    """Read the environment and the file; SettingError names the variable and what it takes."""
    env_file = os.environ.get(f"{PREFIX}ENV_FILE", "")
    if env_file and not Path(env_file).is_file():
        raise SettingError(
            f"TOLLHOUSE_ENV_FILE names {env_file}, which is not a file.",
            next_step="Correct the path or unset it.",
        )
    path = env_file or "tollhouse.env"
    _refuse_unknown_names(path)
    try:
        return Settings(_env_file=path if Path(path).is_file() else None, **overrides)  # type: ignore[call-arg, arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + "_".join(str(part) for part in first["loc"]).upper()
        raise SettingError(
            f"{name} is wrong: {first['msg']} (got {first.get('input')!r}).",
            next_step="Correct or unset it; docs/settings.md lists every setting.",
        ) from None


def setting_names() -> list[str]:
    return [PREFIX + name.upper() for name in Settings.model_fields]


def _refuse_unknown_names(path: str) -> None:
    named = [name for name in os.environ if name.startswith(PREFIX)]
    if Path(path).is_file():
        lines = Path(path).read_text().splitlines()
        named += [line.partition("=")[0].strip() for line in lines if line.startswith(PREFIX)]
    known = setting_names()
    for name in named:
        if name in known or name.removeprefix(PREFIX).startswith(_OTHER_NAMES):
            continue
        close = difflib.get_close_matches(name, known, 1)
        hint = f"Did you mean {close[0]}?" if close else "docs/settings.md lists every setting."
        raise SettingError(f"{name} is not a setting.", next_step=hint)
