"""Runs the cases of a class, each by its own seed, in a copy of its base."""

import multiprocessing
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from core.settings import Settings, load_settings
from engine.loop import Engine
from engine.model_spec import ModelSpec
from engine.models.registry import model_spec, read_config
from tests.engine.cpu_engine import engine_of
from tests.engine.hostile.adapter_cases import adapter_cases
from tests.engine.hostile.case import Case, Draw
from tests.engine.hostile.configs import config_cases
from tests.engine.hostile.gguf_cases import gguf_cases
from tests.engine.hostile.safetensors_files import safetensors_cases
from tests.engine.hostile.serving import read_by_gateway, serve_adapter, serve_model
from tests.engine.hostile.tokenizer_files import tokenizer_cases
from tests.engine.hostile.trial import LOADED, REFUSED, Outcome, tried

CLASSES: dict[str, Callable[[Path, int], Draw]] = {
    "configs": config_cases,
    "tokenizers": lambda bases, seed: tokenizer_cases(bases),
    "safetensors": lambda bases, seed: safetensors_cases(bases),
    "gguf": lambda bases, seed: gguf_cases(bases),
    "adapters": lambda bases, seed: adapter_cases(bases),
}


@dataclass(frozen=True, slots=True)
class Failure:
    number: int
    work: str
    case: str
    outcome: Outcome


def made_bases(directory: Path) -> Path:
    """Written by a process of its own: the libraries that write them stay out of this one."""
    directory.mkdir(parents=True)
    process = multiprocessing.get_context("spawn").Process(target=_make, args=(directory,))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the small models could not be written: {process.exitcode}")
    return directory


def _make(directory: Path) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # progress bars
    from tests.engine.hostile.bases import make

    make(directory)


class Run:
    def __init__(self, bases: Path, scratch: Path, seed: int) -> None:
        torch.set_num_threads(1)
        os.environ["HF_HUB_OFFLINE"] = "1"
        self.bases, self._scratch, self._seed = bases, scratch / "case", seed
        self._settings: Settings = load_settings(data_dir=scratch / "data")
        self._engines: dict[str, tuple[Engine, ModelSpec]] = {}

    def of_class(
        self, name: str, numbers: Iterable[int], shown: Callable[[Failure], object] = lambda _: None
    ) -> tuple[Counter[str], list[Failure]]:
        """How many ended how, and what failed."""
        draw = CLASSES[name](self.bases, self._seed)
        counts: Counter[str] = Counter()
        failures: list[Failure] = []
        for number in numbers:
            case = draw(random.Random(f"{name} {self._seed} {number}"))
            for work in case.works:
                outcome = self._tried(case, work)
                counts[outcome.kind] += 1
                if outcome.kind not in (LOADED, REFUSED):
                    failures.append(Failure(number, work, case.name, outcome))
                    shown(failures[-1])
        return counts, failures

    def _tried(self, case: Case, work: str) -> Outcome:
        shutil.rmtree(self._scratch, ignore_errors=True)
        shutil.copytree(case.base, self._scratch)
        for name, content in case.files.items():
            (self._scratch / name).write_bytes(content)
        path = self._scratch / case.model
        return tried(self._work(case, work, path), case.named)

    def _work(self, case: Case, work: str, path: Path) -> Callable[[], str]:
        if work == "gateway":
            return lambda: read_by_gateway(path, self._settings)
        if work == "engine":
            return lambda: serve_model(path, must_answer=case.answers)
        engine, spec = self.engine(case.base.name)
        return lambda: serve_adapter(engine, spec, path)

    def engine(self, family: str) -> tuple[Engine, ModelSpec]:
        """Of the adapter's base; a child has a copy of it."""
        if family not in self._engines:
            base = self.bases / f"{family}ForCausalLM"
            self._engines[family] = engine_of(base), model_spec(read_config(base))
        return self._engines[family]
