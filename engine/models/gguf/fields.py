"""Typed access to a GGUF file's metadata; every refusal names file, key and value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_fields import shown
from engine.models.gguf.header import GgufHeader


@dataclass(frozen=True, slots=True)
class Fields:
    """Metadata by key; `own` prefixes a key with the architecture's name."""

    path: Path
    values: dict[str, Any]

    @property
    def architecture(self) -> str:
        return self.text("general.architecture")

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    def own(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def whole(self, key: str, default: int | None = None) -> int:
        found = self.values.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int):
            raise self._wrong(key, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.values.get(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self._wrong(key, "a number")
        return float(found)

    def text(self, key: str) -> str:
        found = self.values.get(key)
        if not isinstance(found, str):
            raise self._wrong(key, "a string")
        return found

    def texts(self, key: str) -> list[str]:
        found = self.values.get(key)
        if not isinstance(found, list):
            raise self._wrong(key, "an array of strings")
        return found

    def flag(self, key: str, default: bool) -> bool:
        found = self.values.get(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, "true or false")
        return found

    def _wrong(self, key: str, wanted: str) -> CheckpointError:
        if key not in self.values:
            return self.fail(f"{key} is missing: it must be {wanted}")
        return self.fail(f"{key} is {shown(self.values[key])}: it must be {wanted}")


def fields_of(header: GgufHeader) -> Fields:
    return Fields(header.path, header.metadata)
