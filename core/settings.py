"""All settings, typed, with unit and default, read once at start. A wrong value stops the start.

Values come from the environment (`TOLLHOUSE_*`) and from the file named by `TOLLHOUSE_ENV_FILE`
(default: `tollhouse.env` if it exists). The environment takes precedence.
"""

import difflib
import os
import re
from decimal import Decimal
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from core.errors import SettingError

PREFIX = "TOLLHOUSE_"
# Names read by tests, benchmarks and this file, which are not settings.
_OTHER_NAMES = ("ENV_FILE", "SPECS_DIR", "BENCH_HOME", "MODERATION_DATA", "TEST_", "DEBUG")


NEEDS = ("disk", "serving", "database", "redis")  # parts that `ready_needs` may name


class Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 chooses a free port.")
    workers: int = Field(1, ge=1, le=256, description="Gateway processes on this machine.")
    pin_workers: bool = Field(
        False,
        description="Pin each gateway process to one CPU core, counted from the last allowed core, so "
        "that its threads do not pass the interpreter lock between cores. Leave it off if several "
        "deployments share the machine: they would choose the same cores.",
    )
    data_dir: Path = Field(
        Path("./data"), description="Directory of the spool and of embedded data."
    )
    database_url: str = Field(
        "",
        description="SQLAlchemy database URL; empty: a SQLite file in the data directory. Behind "
        "PgBouncer in transaction mode it ends with ?pooler=transaction.",
    )
    read_database_url: str = Field(
        "",
        description="URL of a read replica of PostgreSQL for the finance API, exports and the pages of "
        "usage, costs and requests; empty: the database itself.",
    )
    events_url: str = Field(
        "",
        description="ClickHouse to which closed days of raw events and charges are moved from "
        "PostgreSQL: clickhouse://user:password@host:8123/database, or clickhouses:// with TLS (the "
        "`clickhouse` extra). With it, nothing is deleted by TOLLHOUSE_USAGE_RETENTION_MONTHS; empty: "
        "they stay in the database.",
    )
    events_days: int = Field(
        7,
        ge=1,
        le=3_650,
        description="Whole days of raw events and charges that PostgreSQL keeps where "
        "TOLLHOUSE_EVENTS_URL is set; earlier ones are moved once they are closed.",
    )
    redis_url: str = Field(
        "", description="Redis URL (redis:// or redis+cluster://) for counters; empty: in memory."
    )
    broker_url: str = Field(
        "", description="Celery broker URL (amqp:// or redis://); empty: tasks run in-process."
    )
    stream_url: str = Field(
        "",
        description="Durable stream between the gateways and the database: "
        "nats://host:4222[,host:4222]?stream=tollhouse_usage&replicas=1&credentials=FILE (JetStream; "
        "the `nats` extra) or kafka://host:9092?topic=tollhouse.usage, where further parameters are "
        "settings of librdkafka (the `kafka` extra); empty: gateways write to the database.",
    )
    model: str = Field(
        "",
        description="Directory in Hugging Face layout, `.gguf` file, hub id (owner/name) or short "
        "name (`tollhouse model known` lists them); empty is the demo model.",
    )
    model_name: str = Field(
        "", description="Public name of the model; empty is the name of its directory or file."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type in which the engine computes."
    )
    quantization: Literal["auto", "none", "int8", "int4"] = Field(
        "auto",
        description="How the engine holds weights on a CPU: auto as the checkpoint stores them, none as "
        "floats, int8 or int4 rounded when they are loaded.",
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="How the engine holds keys and values: auto as it computes, int8 or fp8 in 8 bits.",
    )
    kv_window: int | None = Field(
        None,
        gt=0,
        description="Last positions that each token sees in a local engine's layers of full attention, "
        "and the first TOLLHOUSE_KV_SINKS: a request's memory is bounded, and what is between is "
        "dropped; on a CPU. Unset: all.",
    )
    kv_sinks: int = Field(
        4, ge=0, description="Attention sinks: the first N positions are always attended to."
    )
    kv_heavy: int = Field(
        0, ge=0, description="Positions of a prompt kept by attention mass (SnapKV)."
    )
    batch_invariant: bool = Field(
        False,
        description="A local engine computes each request with the same bits whatever else is in the "
        "batch, on a CPU.",
    )
    tp: int = Field(
        1,
        ge=1,
        le=32,
        description="Ranks of a local engine, processes that each have a part of every layer (tensor "
        "parallelism); on a CPU.",
    )
    draft_model: str = Field(
        "",
        description="Smaller model of the same tokenizer, named as in TOLLHOUSE_MODEL, whose guesses a "
        "local engine verifies several at a time (speculative decoding, on a CPU); empty: none.",
    )
    draft_heads: str = Field(
        "auto",
        description="Folder or file of draft heads, which guess tokens like a draft model; auto: those "
        "in the model's folder, if there are any, or none.",
    )
    adapter_dirs: Annotated[tuple[Path, ...], NoDecode] = Field(
        (), description="Colon-separated directories from which `lora_path` may load adapters."
    )
    kv_tier_ram_mb: int = Field(
        0, ge=0, description="Copies of cached prompts in a local engine's memory, MiB; 0: none."
    )
    kv_tier_disk_mb: int = Field(
        0,
        ge=0,
        description="Encrypted copies of cached prompts on disk for each local engine, MiB, which a "
        "restarted engine finds again; 0: none.",
    )
    kv_tier_redis_url: str = Field(
        "", description="Redis in which local engines share encrypted copies of cached prompts."
    )
    kv_tier_s3_url: str = Field(
        "",
        description="Store that speaks S3, in place of Redis, in which local engines share encrypted "
        "copies of cached prompts: s3://bucket/prefix, with ?endpoint=URL for one other than AWS's.",
    )
    upstreams: str = Field(
        "",
        description="Engines to route to: addresses separated by commas or spaces (tcp://, ipc://, "
        "http://), a JSON list of objects, or the path of a JSON file; empty: a local engine is "
        "started.",
    )
    engines: int = Field(1, ge=1, le=64, description="Number of local engine processes to start.")
    kv_memory_mb: int = Field(0, ge=0, description="KV cache of a local engine, MiB; 0: automatic.")
    engine_public_key: str = Field("", description="CURVE public key of remote engines (Z85).")
    engine_secret_key_file: Path | None = Field(
        None, description="File with the gateway's CURVE key pair for engine sockets."
    )
    admin_token: str = Field("", description="Operator's token; empty: generated at first start.")
    previous_admin_token: str = Field(
        "",
        description="The operator's token before a change: secrets of webhooks that it sealed are "
        "read, and sealed with the new one within ten minutes.",
    )
    metrics_token: str = Field(
        "",
        description="Bearer token that `/metrics` and the parts in `/readyz` require; empty: both are "
        "public. The status of `/readyz` stays public.",
    )
    metrics_listen: str = Field(
        "",
        description="The only address (host:port) that serves `/metrics` and the parts in `/readyz`, "
        "such as 10.0.0.5:9102 or [::1]:9102; empty: TOLLHOUSE_HOST and TOLLHOUSE_PORT serve them.",
    )
    stripe_api_key: str = Field("", description="Stripe secret key; empty: manual payments.")
    stripe_api_base: str = Field("", description="Base URL of the Stripe API; empty: Stripe's own.")
    stripe_webhook_secret: str = Field(
        "", description="Signing secret of the Stripe webhook endpoint."
    )
    taxes: Literal["rates", "stripe"] = Field(
        "rates",
        description="How taxes are computed: rates, from Tollhouse's table of rates; stripe, by Stripe "
        "Tax (needs TOLLHOUSE_STRIPE_API_KEY).",
    )
    dunning: Literal["own", "stripe"] = Field(
        "own",
        description="How a declined card is retried: own, on Tollhouse's dunning schedule; stripe, by "
        "Stripe's Smart Retries.",
    )
    limits_when_redis_down: Literal["closed", "local"] = Field(
        "closed",
        description="Rate limits while Redis is down: reject all requests, or count a local share. "
        "Budgets and credit always reject.",
    )
    max_in_flight: int = Field(
        4096,
        ge=0,
        description="Concurrent requests per gateway process; 0: unlimited. Requests on free plans "
        "are rejected from 80 % of it, on standard plans from 90 %; premium plans queue.",
    )
    moderation: Literal["on", "off"] = Field("on", description="Screen prompts and answers.")
    guards: str = Field(
        "",
        description="Guard models that policies may consult: a JSON list of objects, or the path of "
        'a JSON file: {"guard": "llama-guard", "model": "a served model"} or {"guard": "remote", '
        '"url": "https://api.openai.com", "api_key": "sk-..."}.',
    )
    moderation_retention_days: int = Field(
        90, ge=1, le=3650, description="Retention of moderation decisions, days."
    )
    usage_retention_months: int = Field(
        0,
        ge=0,
        le=240,
        description="Whole months of usage events and engine receipts to keep on PostgreSQL; charges, "
        "roll-ups, ledger and invoices stay. 0: keep everything.",
    )
    closing_keys: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Comma-separated secrets that sign closed days: the first one signs, all verify, so "
        "that a new one is put first. Keep them out of the database's reach; empty: not signed.",
    )
    request_timeout_s: float = Field(600, gt=0, description="Time-out of a request, seconds.")
    force_include_usage: bool = Field(
        False,
        description="Every stream of chat completions and completions ends with its usage, as if the "
        "client had set stream_options.include_usage (vLLM's --enable-force-include-usage).",
    )
    fallbacks: str = Field(
        "",
        description="Fallback models for a model that no engine can serve: small=large,other; "
        "large=other. Charged at the price of the model that served; a tenant may turn it off.",
    )
    virtual_models: str = Field(
        "",
        description="Names that stand for pools of models, as JSON or the path of a file with it: "
        '{"fast": "small", "smart": {"choose": "weighted", "models": [{"model": "large", "weight": 9}, '
        '"other"]}}.',
    )
    response_cache_mb: int = Field(
        64,
        ge=0,
        le=65_536,
        description="Memory of each gateway process for complete answers that tenants cache, MiB; 0: "
        "none are cached.",
    )
    cold_start_s: float = Field(
        60,
        ge=0,
        description="How long a request waits for a model or an adapter that is being loaded, "
        "seconds; streams receive keep-alives meanwhile. 0: reject at once.",
    )
    max_body_mb: int = Field(8, ge=1, le=512, description="Largest request body, MiB.")
    max_file_mb: int = Field(
        200, ge=1, le=4096, description="Largest file accepted by /v1/files, MiB."
    )
    ready_needs: Annotated[tuple[str, ...], NoDecode] = Field(
        ("disk", "serving"),
        description="Parts that `/readyz` needs to answer 200, comma-separated: disk, serving (a "
        "request of some model can be answered now), database, redis. A gateway without engines, for "
        "pages and finance, sets disk alone.",
    )
    file_days: int = Field(
        30,
        ge=0,
        le=3_650,
        description="Days after which a file without `expires_after` is deleted; 0: never.",
    )
    max_media_mb: int = Field(
        32, ge=1, le=512, description="Largest upload of audio or images to an upstream, MiB."
    )
    batch_concurrency: int = Field(
        8,
        ge=0,
        le=1024,
        description="Batch lines that one gateway process runs concurrently; 0: none.",
    )
    idempotency_keys: int = Field(
        100_000, ge=1, description="Idempotency keys that one organisation may use in 24 hours."
    )
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Networks (CIDR, comma-separated) of the proxies whose X-Forwarded-For and "
        "X-Forwarded-Proto are trusted; empty: the client is the peer of the connection.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins (comma-separated, such as https://app.example.com, or *) whose pages may "
        "call the API from a browser; empty: none.",
    )
    demo_tenant: Literal["embedded", "always"] = Field(
        "embedded",
        description="When a start makes the tenant `demo` with an owner's key: embedded (without "
        "TOLLHOUSE_DATABASE_URL), or always.",
    )
    drain_delay_s: float = Field(
        0,
        ge=0,
        description="How long a gateway that got SIGTERM still accepts connections, seconds: /readyz "
        "answers 503 and each answer closes its connection, so that balancers leave it first.",
    )
    drain_timeout_s: float = Field(
        30, ge=0, description="How long open streams may continue at shutdown, seconds."
    )
    tracing_endpoint: str = Field(
        "",
        description="OTLP/HTTP endpoint for OpenTelemetry spans, such as "
        "http://localhost:4318/v1/traces (needs the `tracing` extra); empty: no tracing.",
    )
    log_format: Literal["console", "json"] = Field("console", description="Log format.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Log level."
    )
    smtp_url: str = Field(
        "", description="smtp://user:password@host:port for alert mails; empty: none."
    )
    webhook_networks: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Private networks (CIDR, comma-separated) that webhooks of tenants may reach.",
    )
    four_eyes_above: Decimal | None = Field(
        None,
        ge=0,
        description="Acts on money above this amount (major units of the account's currency) wait for "
        "the confirmation of a second operator; empty: none does.",
    )
    public_url: str = Field("", description="Base URL of links in mails and pages.")
    oidc_issuer: str = Field("", description="OpenID Connect issuer for single sign-on.")
    oidc_client_id: str = Field("", description="OpenID Connect client id.")
    oidc_client_secret: str = Field("", description="OpenID Connect client secret.")
    export_dir: Path | None = Field(
        None, description="Directory of scheduled exports; empty: `exports` in the data directory."
    )
    export_store_url: str = Field(
        "",
        description="Endpoint of the S3-compatible store for scheduled exports; empty: AWS.",
    )

    restore_store: str = Field(
        "",
        description="A second place for the marks by which a restored database is noticed and for the "
        "journal of erasures, after `restore` in the data directory: an absolute directory that all "
        "machines share, or s3://bucket/prefix; empty: none.",
    )

    erasure_journal_days: int = Field(
        400,
        ge=1,
        description="Days for which erasures are remembered beside those marks, so that they are "
        "repeated after a restore: as long as your oldest backup is kept.",
    )

    @field_validator("restore_store")
    @classmethod
    def _is_a_place(cls, value: str) -> str:
        if value and not value.startswith(("s3://", "/")):
            raise ValueError(f"{value!r} is neither an absolute directory nor s3://bucket/prefix")
        return value

    @field_validator("adapter_dirs", mode="before")
    @classmethod
    def _split_paths(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(Path(part) for part in value.split(":") if part)
        return value

    @field_validator("closing_keys", mode="before")
    @classmethod
    def _split_keys(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return value

    @field_validator("closing_keys")
    @classmethod
    def _long_enough(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if any(len(key) < 32 for key in keys):
            raise ValueError(
                "a key has fewer than 32 characters; create one with openssl rand -hex 32"
            )
        return keys

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split_origins(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"https?://[^/?#\s]+", origin):
                raise ValueError(f"{origin!r} is not an origin such as https://app.example.com")
        return origins

    @field_validator("metrics_listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        host, _, port = value.rpartition(":")
        bare = host.strip("[]")
        bracketed = host == f"[{bare}]" if ":" in bare else host == bare
        if value and not (bare and bracketed and port.isdecimal() and int(port) < 1 << 16):
            raise ValueError("it is not an address of the form host:port")
        return value

    @field_validator("ready_needs", mode="before")
    @classmethod
    def _split_needs(cls, value: object) -> object:
        names = value.split(",") if isinstance(value, str) else value
        if isinstance(names, list | tuple):
            names = tuple(str(each).strip() for each in names if str(each).strip())
            for each in names:
                if each not in NEEDS:
                    raise ValueError(f"{each!r} is none of {', '.join(NEEDS)}")
        return names

    @field_validator("webhook_networks", "trusted_proxies", mode="before")
    @classmethod
    def _split_networks(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(str(ip_network(part.strip())) for part in value.split(",") if part.strip())
        return value

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        host, _, port = self.metrics_listen.rpartition(":")
        return (host.strip("[]"), int(port)) if self.metrics_listen else None

    @property
    def effective_database_url(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'tollhouse.db'}"


def load_settings(**overrides: object) -> Settings:
    """Read the environment and the settings file. SettingError names the wrong variable."""
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
