"""What a gateway needs to know of a model: names, context, tokenizer and sampling defaults."""

from pathlib import Path
from typing import Any

from core.errors import SettingError
from core.settings import Settings
from gateway.catalog.catalog import ServedModel
from gateway.catalog.checkpoint import check_servable, read_checkpoint, read_generation, spec_of
from gateway.catalog.codec.tokenizing import codec_of
from gateway.catalog.model_source import locate_configured, locate_draft, short_name
from gateway.catalog.upstreams import read_upstreams

DEMO_NAME = "tollhouse-demo"
_SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 1000.0),
}  # with their ranges


def model_name(settings: Settings) -> str:
    if settings.model_name:
        return settings.model_name
    return short_name(settings.model) if settings.model else DEMO_NAME


def resolved(settings: Settings) -> Settings:
    """With the model's files in place of what names them, fetched where they must be, and checked:
    the architecture, the tokenizer and the chat template are read, and no weights. The engine compares
    the vocabulary of a draft model with the served one's."""
    path = locate_configured(settings)
    check_servable(path)
    served_model(settings, path)
    draft = locate_draft(settings)
    found = {"draft_model": str(draft)} if draft is not None else {}
    if settings.model:
        found |= {"model": str(path), "model_name": model_name(settings)}
    return settings.model_copy(update=found)


def served_names(settings: Settings) -> list[str]:
    """Public names of the models served, the one used in examples first."""
    own = model_name(settings)
    result = [upstream.model or own for upstream in read_upstreams(settings.upstreams)] or [own]
    return sorted(dict.fromkeys(result), key=lambda name: name != own)


def served_model(settings: Settings, path: Path) -> ServedModel:
    """`path` is a directory in Hugging Face layout or a `.gguf` file."""
    files = read_checkpoint(path)
    described = path if path.is_file() else path / "config.json"
    if not files.context_length:
        raise SettingError(
            f"{described} does not say the model's context (max_position_embeddings).",
            next_step="Give a directory in Hugging Face layout, or a .gguf file.",
        )
    return ServedModel(
        model_name(settings),
        codec_of(files),
        files.context_length,
        int(described.stat().st_mtime),
        defaults=sampling_of(files.generation),
        spec=spec_of(files.config),
    )


def sampling_defaults(path: Path) -> dict[str, float]:
    """The publisher's own settings in generation_config.json, as vLLM and transformers read them."""
    return sampling_of(read_generation(path))


def sampling_of(generation_config: dict[str, Any]) -> dict[str, float]:
    result = {
        name: generation_config[name]
        for name in _SAMPLING
        if isinstance(generation_config.get(name), int | float)
        and not isinstance(generation_config[name], bool)
    }
    for name, value in result.items():
        first, last = _SAMPLING[name]
        if not first <= value <= last or (name == "top_k" and value != int(value)):
            raise SettingError(
                f"generation_config.json has {name} {value!r}: it must be from {first} to {last}"
                f"{' and a whole number' if name == 'top_k' else ''}.",
                next_step=f"Correct or remove {name}.",
            )
    if generation_config.get("do_sample") is False:
        result["temperature"] = 0.0
    return result
