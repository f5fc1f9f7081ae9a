"""Checkpoints by GPTQ and AWQ, written value by value from the descriptions of their layouts, and the
same weights as floats."""

import atexit
import json
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.engine.checkpoints import save_checkpoint

_SITES = re.compile(r"(?<=self_attn\.)[qkv]_proj|(?<=mlp\.)(gate|up)_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each four bits of a word, from the lowest


def words_by_input(codes: np.ndarray, bits: int) -> torch.Tensor:
    """GPTQ's qweight: [in, out] to [in * bits / 32, out]."""
    each = 32 // bits
    words = np.zeros((codes.shape[0] // each, codes.shape[1]), np.uint32)
    for row, column in np.ndindex(*codes.shape):
        words[row // each, column] |= np.uint32(int(codes[row, column]) << bits * (row % each))
    return torch.from_numpy(words.view(np.int32))


def words_by_output(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[rows, out] to [rows, out * bits / 32], the outputs of a word in this order."""
    each = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // each)), np.uint32)
    for row, word in np.ndindex(*words.shape):
        for place in range(each):
            column = word * each + order[place]
            if column < codes.shape[1]:
                words[row, word] |= np.uint32(int(codes[row, column]) << bits * place)
    return torch.from_numpy(words.view(np.int32))


class Random:
    """A random matrix in groups: its tensors, its values [out, in], as stored and as codes are
    computed, and the group of each input."""

    def __init__(self, random: np.random.Generator, shape: tuple[int, int], **how: Any) -> None:
        out, width = shape
        bits, group = how.get("bits", 4), how.get("group", 32)
        groups = 1 if group == -1 else width // group
        awq, middle = how.get("method") == "awq", 1 << (bits - 1)
        self.codes = random.integers(0, 1 << bits, (width, out))
        # Each zero of a code but the last: an earlier version's 0 takes all bits of its word.
        zeros = random.integers(0 if how.get("second") or awq else 1, 1 << bits, (groups, out))
        self.zeros = np.full_like(zeros, middle) if how.get("symmetric") else zeros
        scales = random.uniform(0.5, 1.5, (groups, out)) / middle / width**0.5
        scales[:, ::7] *= -1
        self.scales = scales.astype(np.float16)
        self.index = np.arange(width) * groups // width
        if how.get("sorted_groups"):
            given = how.get("index")
            self.index = random.permutation(self.index) if given is None else given
        steps = self.codes - self.zeros[self.index]
        self.values = (steps * self.scales.astype(np.float64)[self.index]).T
        self.served = self.values
        if not how.get("symmetric"):  # scale * zero is rounded to float16
            pivot = 0 if bits == 4 else 128
            scales = self.scales.astype(np.float64)
            low = (scales * (pivot - self.zeros)).astype(np.float16).astype(np.float64)
            self.served = ((self.codes - pivot) * scales[self.index] + low[self.index]).T
        order = AWQ_ORDER if awq else tuple(range(32 // bits))
        stored = self.zeros if awq or how.get("second") else self.zeros - 1
        self.tensors = {
            "qweight": words_by_output(self.codes, 4, order)
            if awq
            else words_by_input(self.codes, bits),
            "qzeros": words_by_output(stored, bits, order),
            "scales": torch.from_numpy(self.scales),
        }
        if not awq:
            self.tensors["g_idx"] = torch.from_numpy(self.index.astype(np.int32))


def declared(**how: Any) -> dict[str, Any]:
    """As AutoAWQ and GPTQModel write `quantization_config`."""
    shared = {"bits": how.get("bits", 4), "group_size": how.get("group", 32)}
    if how.get("method") == "awq":
        return shared | {"quant_method": "awq", "version": "gemm", "zero_point": True}
    return shared | {
        "quant_method": "gptq", "sym": bool(how.get("symmetric")), "damp_percent": 0.1,
        "desc_act": bool(how.get("sorted_groups")),
        "checkpoint_format": "gptq_v2" if how.get("second") else "gptq",
    }  # fmt: skip


def pair(folder: Path, shape: dict[str, Any], **how: Any) -> tuple[Path, Path, dict[str, Random]]:
    """(in floats, quantised, by module) of a `family`, or a Llama, with these sizes: a copy of the test's
    own, as writing them value by value takes longer than most tests of them."""
    kept, by_module = _written(tuple(sorted(shape.items())), tuple(sorted(how.items())))
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder / "dense", folder / "quantised", by_module


@cache
def _kept() -> Path:
    """Made once per process and removed at its end."""
    directory = Path(tempfile.mkdtemp(prefix="tollhouse-grouped-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


@cache
def _written(
    shape: tuple[tuple[str, Any], ...], how: tuple[tuple[str, Any], ...]
) -> tuple[Path, dict[str, Random]]:
    folder = Path(tempfile.mkdtemp(dir=_kept()))
    return folder, _write(folder, dict(shape), **dict(how))


def _write(folder: Path, shape: dict[str, Any], **how: Any) -> dict[str, Random]:
    dense = save_checkpoint(folder / "dense", how.get("family", "Llama"), **shape)
    values = load_file(dense / "model.safetensors")
    quantised = folder / "quantised"
    quantised.mkdir()
    held, random = dict(values), np.random.default_rng(11)
    by_module: dict[str, Random] = {}
    indices: dict[str, np.ndarray] = {}
    for name in sorted(values):
        if "_proj.weight" not in name:
            continue
        stem = name.removesuffix("weight")
        out, width = values[name].shape
        # Matrices of one input are sorted alike, as GPTQ sorts them, unless `apart`.
        site = stem if how.get("apart") else _SITES.sub("", stem)
        matrix = Random(random, (out, width), index=indices.get(site), **how)
        indices[site] = matrix.index
        values[name] = torch.from_numpy(matrix.values).float().contiguous()
        del held[name]
        held |= {stem + part: tensor for part, tensor in matrix.tensors.items()}
        by_module[stem] = matrix
    save_file(values, dense / "model.safetensors", metadata={"format": "pt"})
    save_file(held, quantised / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = declared(**how)
    (quantised / "config.json").write_text(json.dumps(config))
    return by_module
