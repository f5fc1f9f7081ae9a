"""What a text says of the inputs of each matrix: how much an error in each of its columns weighs.

Rounding by it (as AWQ, arXiv 2306.00978, finds the inputs that matter) leaves the inputs themselves as
they are, so that adapters of the float weights fit the rounded ones; scales that are moved into the norms
before would change what an adapter multiplies.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer

from engine.backends.cpu.operations import CpuOperations
from engine.backends.layers.any_mixture import AnyMixture
from engine.backends.layers.experts import Mixture
from engine.backends.layers.kv import KvPool
from engine.backends.layers.matrices import FUSED, MODULES, sites_of
from engine.backends.layers.norm import RmsNorm
from engine.backends.layers.operations import GatedSite, Site
from engine.backends.layers.rotary import rotary_tables
from engine.backends.layers.step import StepInputs, StepPlanner
from engine.batch import Row
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_spec import ModelSpec
from engine.models.load import load_model
from engine.models.tokenizer_file import tokenizer_json
from engine.protocol import SamplingParams

WINDOW = 256  # tokens that are computed together
MOST_WINDOWS = 64
_LEAST_WINDOWS = 4
_BLOCK = 16

Squares = dict[tuple[int, str], torch.Tensor]


class InputRecorder(CpuOperations):
    """Adds up the squares of the inputs of each site, [in], by layer and name."""

    def __init__(self, spec: ModelSpec, pool: KvPool, step: StepInputs, squares: Squares) -> None:
        super().__init__(spec, pool, step)
        self._squares = squares

    def _note(self, layer: int, name: str, x: torch.Tensor) -> None:
        found = x.float().square().sum(0)
        self._squares[layer, name] = self._squares.get((layer, name), 0) + found

    def project(self, site: Site, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        self._note(site.layer, site.name, x if norm is None else norm(x))
        return super().project(site, x, norm)

    def gate(self, site: GatedSite, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        self._note(site.layer, site.name, x if norm is None else norm(x))
        return super().gate(site, x, norm)

    def add(
        self, site: Site, y: torch.Tensor, x: torch.Tensor, norm: RmsNorm | None
    ) -> torch.Tensor:
        self._note(site.layer, site.name, y)
        return super().add(site, y, x, norm)

    def mix(self, mixture: AnyMixture, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        assert isinstance(mixture, Mixture)
        self._note(mixture.layer, "experts", x if norm is None else norm(x))
        return super().mix(mixture, x, norm)


@torch.inference_mode()
def input_weights(source: Path, text: Path) -> Mapping[str, torch.Tensor]:
    """The mean square of each input, [in], by the name of the matrix; a mixture's by that of its layer,
    for what its experts read. The model is computed in float32, on a CPU.

    Raises ConfigError for a text that is too short or no text, CheckpointError for the checkpoint.
    """
    windows = _windows(source, text)
    model = load_model(
        EngineConfig(model=str(source), dtype="float32", quantization="none", device="cpu")
    )
    spec, blocks = model.spec, list(range(WINDOW // _BLOCK))
    pool = KvPool(spec, len(blocks), _BLOCK, model.dtype, model.device)
    tables = rotary_tables(spec, model.native_context, model.dtype)
    plan = StepPlanner(pool, tables, spec.sights, lambda _decodes, _prefills: None)
    squares: Squares = {}
    for ids in windows:
        if max(ids) >= spec.vocab:
            raise ConfigError(f"{source}: its tokenizer has ids beyond its {spec.vocab} embeddings")
        row = Row(0, ids, 0, blocks, None, True, SamplingParams(max_tokens=1), 0, ids, len(ids))
        step = plan([], [row], ids, all_logits=True)
        model.decoder(InputRecorder(spec, pool, step, squares))
    tokens = len(windows) * WINDOW
    return _by_matrix(spec, {key: each / tokens for key, each in squares.items()})


def _windows(source: Path, text: Path) -> list[list[int]]:
    """Parts of the text, from its beginning to its end, of WINDOW tokens each."""
    tokenizer = tokenizer_json(source)
    if tokenizer is None:
        raise ConfigError(f"{source} has no tokenizer.json, which a text is read with")
    try:
        words = text.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the text {text} cannot be read: {error}") from None
    ids = Tokenizer.from_str(tokenizer).encode(words, add_special_tokens=False).ids
    whole = len(ids) // WINDOW
    if whole < _LEAST_WINDOWS:
        raise ConfigError(
            f"the text {text} has {len(ids)} tokens: give at least {_LEAST_WINDOWS * WINDOW}, of the "
            "kind that the model will read"
        )
    count = min(whole, MOST_WINDOWS)
    return [ids[n * whole // count * WINDOW :][:WINDOW] for n in range(count)]


def _by_matrix(spec: ModelSpec, squares: Squares) -> dict[str, torch.Tensor]:
    found = {}
    for (layer, name), weights in squares.items():
        root = f"{spec.root}.layers.{layer}"
        if name == "experts":
            found[root] = weights
            continue
        for part in sites_of(spec, layer).get(name, ()):
            found[f"{root}.{MODULES[part]}.weight"] = weights
        whole = next((module for module in spec.fused if name in ("qkv", "gate_up")
                      and FUSED[module] == sites_of(spec, layer).get(name)), None)  # fmt: skip
        if whole is not None:
            found[f"{root}.{whole}.weight"] = weights
    return found
