"""From the words of a command, a query or a form to a question for the planner."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from core.errors import BadRequest
from engine.errors import EngineError
from engine.planning.devices import Device, device
from engine.planning.known_models import known_names, known_shape
from engine.planning.memory import Adapters
from engine.planning.model_shape import ModelShape, shape_of
from engine.planning.plan import Question
from engine.planning.precision import Precision, kv_bytes, precision
from engine.planning.step_times import SERVERS
from engine.planning.workload import Workload

_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|)\s*")
_MOST_DEVICES = 4096
_MOST_ADAPTERS = 100_000
_DTYPES = {"float32": "float32", "bfloat16": "bf16", "float16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Everything as it is written; "" and 0 leave it to the planner. Times: `300ms`, `0.3s`, or
    milliseconds."""

    model: str = "llama-3.1-70b"
    gpu: str = "h100"
    count: int = 0
    tp: int = 0
    pp: int = 0
    dp: int = 0
    ep: int = 0
    quantization: str = ""
    kv_dtype: str = ""
    rate: float = 20.0
    prompt: float = 1000.0
    output: float = 300.0
    shared_prefix: float = 0.0
    adapters: int = 0
    adapter_rank: int = 16
    ttft: str = "300ms"
    tpot: str = "40ms"
    server: str = ""
    gpu_price: float = 0.0
    acceptance: float = 0.0
    guesses: int = 0

    @classmethod
    def of(cls, written: Mapping[str, str]) -> "PlanOptions":
        """From text, as queries and forms have it. BadRequest names a field that is no number; names
        that are no options are not for here."""
        found: dict[str, Any] = {}
        for each in fields(cls):
            text = written.get(each.name, "").strip()
            if not text:
                continue
            if each.type is str:
                found[each.name] = text
                continue
            try:
                found[each.name] = int(text) if each.type is int else float(text)
            except (ValueError, OverflowError):
                kind = "a whole number" if each.type is int else "a number"
                raise _wrong(each.name, f"is {text[:40]!r}", f"Give {kind}.") from None
        return cls(**found)


def seconds_of(text: str, name: str) -> float:
    """Of `300ms`, `0.3s` or `300`, which is milliseconds; "" and 0: no objective."""
    if not text.strip():
        return 0.0
    match = _DURATION.fullmatch(text)
    if match is None:
        raise _wrong(
            name, f"is {text[:40]!r}", "Give milliseconds or seconds, such as 300ms or 0.3s."
        )
    return float(match[1]) / (1 if match[2] == "s" else 1000)


def question_of(options: PlanOptions, found: "Described") -> Question:
    """`found`: the model that the options name. BadRequest says which option cannot be."""
    for name, most in (
        ("count", _MOST_DEVICES), ("tp", 64), ("pp", 64), ("dp", 64), ("ep", 1024),
        ("adapters", _MOST_ADAPTERS), ("adapter_rank", 1024), ("guesses", 64),
    ):  # fmt: skip
        if not 0 <= getattr(options, name) <= most:
            raise _wrong(name, f"is {getattr(options, name)}", f"Give a number from 0 to {most}.")
    for name in ("rate", "prompt", "output", "shared_prefix", "gpu_price", "acceptance"):
        if not math.isfinite(getattr(options, name)):
            raise _wrong(name, "is not finite", "Give a number.")
    if options.gpu_price < 0:
        raise _wrong("gpu_price", f"is {options.gpu_price:g}", "Give dollars an hour, 0 or more.")
    if options.server not in ("", *SERVERS):
        names = ", ".join(SERVERS)
        raise _wrong("server", f"is {options.server!r}", f"Use one of {names}, or leave it out.")
    try:
        held = precision(options.quantization) if options.quantization else found.precision
        return Question(
            shape=found.shape,
            workload=Workload(
                rate=options.rate,
                prompt=options.prompt,
                output=options.output,
                shared=options.shared_prefix,
                ttft=seconds_of(options.ttft, "ttft"),
                tpot=seconds_of(options.tpot, "tpot"),
                acceptance=options.acceptance,
                guesses=options.guesses,
            ),
            devices=_devices(options),
            precision=held,
            kv_bytes=kv_bytes(options.kv_dtype or "bf16"),
            tensor=options.tp,
            pipeline=options.pp,
            data=options.dp,
            expert=options.ep,
            count=options.count,
            adapters=Adapters(options.adapters, max(1, options.adapter_rank)),
            server=options.server,
        )
    except EngineError as error:
        raise BadRequest(
            error.message, next_step="Correct the option that the message names."
        ) from None


def _devices(options: PlanOptions) -> list[Device]:
    names = [name for name in re.split(r"[,\s]+", options.gpu) if name]
    if not names:
        raise _wrong("gpu", "is empty", "Give one or more devices, such as h100,h200.")
    found = [device(name) for name in names]
    return [each.at_price(options.gpu_price) for each in found] if options.gpu_price else found


@dataclass(frozen=True, slots=True)
class Described:
    """A model, and the precision that its files have."""

    shape: ModelShape
    precision: Precision


def model_by_name(name: str) -> Described | None:
    """Of the models whose sizes are known here; nothing is read from disk."""
    shape = known_shape(name)
    if shape is None:
        return None
    return Described(shape, precision(shape.stored or "bf16"))


def unknown_model(name: str) -> BadRequest:
    names = ", ".join(known_names())
    return BadRequest(
        f"model is {name[:80]!r}, whose sizes are not known here.",
        next_step=f"Give a config.json, a .gguf file, a checkpoint directory, or one of: {names}.",
        param="model",
    )


def model_of_file(path: Path) -> Described:
    """Of a config.json, a directory that has one, or a `.gguf` file."""
    from gateway.catalog.checkpoint import read_config

    if path.is_dir() or path.suffix.lower() == ".gguf":
        raw = read_config(path)
    else:
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise BadRequest(f"{path} cannot be read as JSON: {error}.", param="model") from None
    if not isinstance(raw, dict) or not raw:
        raise BadRequest(
            f"{path} holds no configuration of a model.",
            next_step="Give a config.json in Hugging Face layout, or a .gguf file.",
            param="model",
        )
    try:
        shape = shape_of(raw, path.stem if path.is_file() else path.name)
        if path.suffix.lower() == ".gguf":
            share = path.stat().st_size / shape.parameters
            return Described(shape, Precision("gguf", share, share, share, "bf16", table=share))
        said = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
        return Described(shape, precision(shape.stored or _DTYPES.get(said, "bf16")))
    except EngineError as error:
        raise BadRequest(
            error.message, next_step="Correct the file that --model names.", param="model"
        ) from None


def _wrong(name: str, what: str, then: str) -> BadRequest:
    return BadRequest(f"{name.replace('_', '-')} {what}.", next_step=then, param=name)
