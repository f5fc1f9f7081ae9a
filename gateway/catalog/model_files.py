"""Reads a model's name, context length and tokenizer from its directory, without the weights."""

import json
from pathlib import Path

from core.errors import SettingError
from core.settings import Settings
from engine.demo.paths import MODEL_DIR
from gateway.catalog.catalog import ServedModel
from gateway.prompts.tokenizing import load_codec
from gateway.upstreams.config import read_upstreams

DEMO_NAME = "tollhouse-demo"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]


def model_directory(settings: Settings) -> Path:
    """Raises SettingError if TOLLHOUSE_MODEL is neither a directory nor a hub id that downloads."""
    if not settings.model:
        return MODEL_DIR
    path = Path(settings.model)
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or settings.model.startswith("."):
        raise SettingError(
            f"TOLLHOUSE_MODEL names {settings.model}, which is not a directory.",
            next_step="Set it to a directory in Hugging Face layout, or to a hub id.",
        )
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(settings.model, allow_patterns=_DOWNLOAD_PATTERNS))
    except ImportError:
        why = "huggingface_hub is not installed"
    except Exception as error:
        why = str(error).partition("\n")[0]
    raise SettingError(
        f"TOLLHOUSE_MODEL is {settings.model!r}: no such directory, and the download failed: {why}.",
        next_step="Set it to a directory in Hugging Face layout.",
    )


def model_name(settings: Settings) -> str:
    if settings.model_name:
        return settings.model_name
    return Path(settings.model.rstrip("/")).name if settings.model else DEMO_NAME


def served_names(settings: Settings) -> list[str]:
    """Public names of the models served, the one used in examples first."""
    own = model_name(settings)
    result = [upstream.model or own for upstream in read_upstreams(settings.upstreams)] or [own]
    return sorted(dict.fromkeys(result), key=lambda name: name != own)


def served_model(settings: Settings, directory: Path) -> ServedModel:
    config_file = directory / "config.json"
    if not config_file.is_file():
        raise SettingError(
            f"{directory} has no config.json.",
            next_step="Point TOLLHOUSE_MODEL at a directory in Hugging Face layout.",
        )
    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        context = int(config["max_position_embeddings"])
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{config_file} cannot be read: {error!r}.", next_step="Replace it with a valid file."
        ) from None
    created = int(config_file.stat().st_mtime)
    codec, defaults = load_codec(directory), sampling_defaults(directory)
    return ServedModel(model_name(settings), codec, context, created, defaults=defaults)


def sampling_defaults(directory: Path) -> dict[str, float]:
    """The publisher's defaults in generation_config.json, read as vLLM and transformers do."""
    file = directory / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        generation_config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingError(
            f"{file} is not JSON: {error}.", next_step="Replace it with a valid file."
        ) from None
    result = {
        name: generation_config[name]
        for name in _SAMPLING
        if isinstance(generation_config.get(name), int | float)
    }
    if generation_config.get("do_sample") is False:
        result["temperature"] = 0.0
    return result
