"""A model's files as the gateway reads them: configuration, tokenizer and templates, no weights.

One view for a directory in Hugging Face layout and for a `.gguf` file.
"""

import json
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from core.errors import SettingError
from gateway.catalog.panics import is_panic

if TYPE_CHECKING:
    from engine.model_spec import ModelSpec

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_DEFAULT = "default"
_MOST_TEMPLATE = 1 << 20  # characters; the longest published ones have a fiftieth
_SAMPLES = ("", "Hello, world 123\n", "a" * 64 + "!", " " * 256, "\u00e9\u4e16\U0001f600")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    tokenizer: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, …
    templates: dict[str, str]  # chat templates by name; `default` is the usual one
    eos_ids: tuple[int, ...]
    config: dict[str, Any] = field(default_factory=dict)  # config.json; empty where there is none
    generation: dict[str, Any] = field(default_factory=dict)  # generation_config.json
    context_length: int = 0  # tokens; 0 where the configuration does not say


def read_checkpoint(path: Path) -> Checkpoint:
    """SettingError names the file at fault."""
    return _of_gguf(path) if path.is_file() else _of_directory(path)


def read_config(path: Path) -> dict[str, Any]:
    """The configuration alone, in the form of config.json."""
    if path.is_file():
        return dict(_described(path).config)
    return _json(path / "config.json")


def read_generation(path: Path) -> dict[str, Any]:
    """generation_config.json; empty where there is none, as in a `.gguf` file."""
    return {} if path.is_file() else _json(path / "generation_config.json")


def check_servable(path: Path) -> None:
    """SettingError where the engine does not serve this architecture or weight format."""
    config = read_config(path)
    if not config:
        raise SettingError(f"{path} has no config.json.", next_step=_NEXT)
    _spec(path, config)


def spec_of(config: dict[str, Any]) -> "ModelSpec | None":
    """The model's shape; None for a family that the engine does not serve."""
    from engine.errors import CheckpointError
    from engine.models.registry import model_spec

    try:
        return model_spec(config)
    except CheckpointError:
        return None


def _spec(path: Path, config: dict[str, Any]) -> "ModelSpec":
    from engine.errors import CheckpointError
    from engine.models.registry import model_spec

    try:
        return model_spec(config)
    except CheckpointError as error:
        raise SettingError(
            f"{path} cannot be served: {error.message}.",
            next_step="Choose a model of a family that is served.",
        ) from None


def _of_directory(path: Path) -> Checkpoint:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise SettingError(f"{path} has no tokenizer.json.", next_step=_NEXT)
    tokenizer = _tokenizer(file)
    written = _json(path / "tokenizer_config.json")
    tokens = {n: _token_text(path, n, written[n]) for n in _NAMED_TOKENS if written.get(n)}
    config = _json(path / "config.json")
    generation = read_generation(path)
    found = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
    if "eos_token" in tokens:
        named = tokenizer.token_to_id(tokens["eos_token"])
        found += [named] if named is not None else []
    return Checkpoint(
        path=path,
        tokenizer=tokenizer,
        special_tokens=tokens,
        templates=_templates(path, written.get("chat_template")),
        eos_ids=tuple(dict.fromkeys(found)),
        config=config,
        generation=generation,
        context_length=_context(path, config),
    )


def _tokenizer(file: Path) -> Tokenizer:
    from engine.errors import CheckpointError
    from engine.models.tokenizer_file import read_tokenizer

    try:
        tokenizer: Tokenizer = read_tokenizer(file)
        _try(tokenizer)
    except CheckpointError as error:
        raise SettingError(f"{error.message}.", next_step="Fetch the file again.") from None
    except BaseException as error:  # the library raises nothing narrower, and panics
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise SettingError(
            f"{file} is not a tokenizer that works: {str(error)[:300]}.",
            next_step="Fetch the file again.",
        ) from None
    return tokenizer


def _try(tokenizer: Tokenizer) -> None:
    """Raises what the tokenizer's parts raise at plain texts: of some, the library checks nothing when
    it reads them."""
    for text in _SAMPLES:
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=True).ids)


def _of_gguf(path: Path) -> Checkpoint:
    model = _described(path)
    return Checkpoint(
        path=path,
        tokenizer=model.tokenizer,
        special_tokens=dict(model.special_tokens),
        templates={_DEFAULT: model.chat_template} if model.chat_template else {},
        eos_ids=tuple(model.eos_ids),
        config=dict(model.config),
        context_length=int(model.context_length),
    )


def _described(path: Path) -> Any:
    """The engine's reading of a `.gguf` file."""
    from engine.errors import CheckpointError

    try:
        return import_module("engine.models.gguf").describe(path)
    except (CheckpointError, OSError, ValueError, LookupError) as error:
        why = error.message if isinstance(error, CheckpointError) else str(error)
        raise SettingError(
            f"{path} cannot be read: {why}.", next_step="Give a complete .gguf file."
        ) from None


def _templates(path: Path, written: object) -> dict[str, str]:
    """As transformers reads them: chat_template.jinja wins over tokenizer_config.json, which has
    one string or a list of names and templates; further ones lie in additional_chat_templates."""
    found: dict[str, str] = {}
    if isinstance(written, str):
        found[_DEFAULT] = written
    elif isinstance(written, list):
        for each in written:
            if not (isinstance(each, dict) and isinstance(each.get("template"), str)):
                raise SettingError(
                    f"{path / 'tokenizer_config.json'} has a chat_template that is neither a "
                    "string nor a list of objects with name and template.",
                    next_step="Correct chat_template.",
                )
            found[str(each.get("name"))] = each["template"]
    elif isinstance(written, dict):
        found |= {str(name): str(template) for name, template in written.items()}
    if (file := path / "chat_template.jinja").is_file():
        found[_DEFAULT] = _text(file)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _text(file)
    for name, text in found.items():
        if len(text) > _MOST_TEMPLATE:
            raise SettingError(
                f"{path} has a chat_template, {name!a}, of {len(text)} characters: at most "
                f"{_MOST_TEMPLATE} are read.",
                next_step="Correct chat_template.",
            )
        if not _is_unicode(text):
            raise SettingError(
                f"{path / 'tokenizer_config.json'} has a chat_template, {name!a}, with a "
                "lone surrogate.",
                next_step="Correct chat_template.",
            )
    return {name: text for name, text in found.items() if text}  # an empty one is none


def _is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: JSON may hold one half of a pair of surrogates."""
    return text.isascii() or text == text.encode(errors="replace").decode()


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{file} cannot be read: {error}.", next_step="Replace it.") from None


def _ids(value: object) -> list[int]:
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []


def _context(path: Path, config: dict[str, Any]) -> int:
    from engine.models.registry import FAMILIES

    served = any(name in FAMILIES for name in config.get("architectures") or ())
    implied = served and "max_position_embeddings" not in config
    if isinstance(config.get("text_config"), dict) or implied:  # by the family
        return _spec(path, config).context
    value = config.get("max_position_embeddings", 0)
    if not isinstance(value, int):
        raise SettingError(
            f"{path / 'config.json'} has max_position_embeddings {value!r}, not a whole number.",
            next_step="Set it to a whole number.",
        )
    return value


def _token_text(path: Path, name: str, value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else str(value)
    if not isinstance(text, str) or not _is_unicode(text):
        raise SettingError(
            f"{path / 'tokenizer_config.json'} has {name} {str(value)[:200]!a}, which is not a token.",
            next_step=f"Set {name} to the token's text.",
        )
    return text


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(
            f"{file} is not JSON: {error}.", next_step="Fetch the file again."
        ) from None
    return content if isinstance(content, dict) else {}


_NEXT = "Give a directory in Hugging Face layout, or a .gguf file."
