"""The recipe: digests that identify the data, settings and files of the shipped model."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.demo.paths import ADAPTERS, DEMO_DIR, MODEL_DIR, RECIPE
from training.demo import settings
from training.demo.chat import Dialogue, written
from training.demo.dialogues import make_dialogues, make_openings
from training.demo.tokenizer import write_json

HASHED_DIALOGUES = 2_000


def digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def data_digest() -> str:
    """Digest of the first dialogues of every part of the training."""
    made: list[Dialogue] = make_dialogues(HASHED_DIALOGUES, settings.SEED)
    made += make_dialogues(HASHED_DIALOGUES, settings.SEED + 1, hurried=True)
    made += make_openings(HASHED_DIALOGUES, settings.SEED + 2)
    for style in settings.STYLES:
        made += make_dialogues(HASHED_DIALOGUES // 10, settings.SEED, style.name, hurried=True)
    return digest("\x00".join(written(dialogue) for dialogue in made).encode())


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """Digest of vocabulary and merges, independent of the file format's other fields."""
    model = json.loads(tokenizer.to_str())["model"]
    return digest(json.dumps([model["vocab"], model["merges"]], sort_keys=True).encode())


def hyper_parameters() -> dict[str, Any]:
    return {
        "seed": settings.SEED,
        "vocab_size": settings.VOCAB_SIZE,
        "context": settings.CONTEXT,
        "processes": settings.PROCESSES,
        "shape": asdict(settings.SHAPE),
        "base": asdict(settings.BASE),
        "polish": asdict(settings.POLISH),
        "opening_tokens": settings.OPENING_TOKENS,
        "heads": asdict(settings.HEADS),
        "adapters": [asdict(style) for style in settings.STYLES],
    }


def shipped_files() -> list[Path]:
    directories = [one for one in (MODEL_DIR, *ADAPTERS.values()) if one.exists()]
    return sorted(file for directory in directories for file in directory.iterdir())


def file_digests() -> dict[str, str]:
    return {
        file.relative_to(DEMO_DIR).as_posix(): digest(file.read_bytes()) for file in shipped_files()
    }


def read_recipe() -> dict[str, Any]:
    recipe: dict[str, Any] = json.loads(RECIPE.read_text(encoding="utf-8"))
    return recipe


def record(**entries: Any) -> None:
    """Adds entries to the recipe and updates the digests of data, settings and files."""
    recipe = read_recipe() if RECIPE.exists() else {}
    recipe |= entries
    recipe |= {
        "hyper_parameters": hyper_parameters(),
        "data": data_digest(),
        "vocabulary": vocabulary_digest(Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))),
        "files": file_digests(),
        "bytes": sum(file.stat().st_size for file in shipped_files()),
    }
    write_json(RECIPE, recipe)
