"""llama.cpp on a GGUF file as it is, for rates; or, given the files of a check, its ids and logits.

Stands alone: it runs in an environment without this project.

run_llama_cpp_file.py WORK.json                    asked for a rate at a time
run_llama_cpp_file.py WORK.json ANSWERS.json F32   compares; writes the model to F32 on the way
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as lc
import numpy as np
from llama_cpp_batch import BATCH, decode, logits_of, make_context, rate, survives_tiles
from protocol import answer


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    lc.llama_backend_init()
    lc.llama_log_set(_silent, ctypes.c_void_p())
    if len(sys.argv) > 2:
        _check(work, Path(sys.argv[2]), Path(sys.argv[3]))
        return
    model = _load(work["model"])
    prompts = work["prompts"]
    rate(model, work, prompts[:1])
    answer(
        {
            "base": lambda: rate(model, work, prompts),
            "one": lambda: rate(model, work, prompts[:1]),
        }
    )


@lc.llama_log_callback
def _silent(*_: Any) -> None:
    """llama.cpp's log, hundreds of lines a context."""


def _load(path: str) -> Any:
    """Without the layouts made for AMX tiles where they end the process, as some hosts' tiles do."""
    params = lc.llama_model_default_params()
    params.use_extra_bufts = survives_tiles(path)
    if not params.use_extra_bufts:
        print("llama.cpp: tiles end its process here: they are off", file=sys.stderr)
    return lc.llama_model_load_from_file(path.encode(), params)


def _check(work: dict[str, Any], target: Path, wide: Path) -> None:
    """Our tokens of the file on the file itself, where llama.cpp rounds activations to eight bits before
    each product, and on the same weights in float32, where it does not; our tokens of float32 there."""
    model = _load(work["model"])
    vocab = lc.llama_model_get_vocab(model)
    found: dict[str, Any] = {"ids": [_ids(vocab, text) for text in work["texts"]]}
    answers = work["answers"]
    found["file"] = _forced(model, work, answers["file"])
    _write_float32(Path(work["model"]), wide)
    model = _load(str(wide))
    found["file_float32"] = _forced(model, work, answers["file"])
    found["float32"] = _forced(model, work, answers["float32"])
    target.write_text(json.dumps(found), encoding="utf-8")


def _write_float32(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(str(target), "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=part)
    for tensor in reader.tensors:
        wide = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, np.ascontiguousarray(wide, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _forced(model: Any, work: dict[str, Any], answers: list[list[int]]) -> list[list[list[float]]]:
    """A sequence a prompt: at each of our tokens llama.cpp's best one, its logit, that of ours."""
    vocab = lc.llama_model_get_vocab(model)
    found = []
    for prompt, ours in zip(work["prompts"], answers, strict=True):
        context = make_context(model, 1, len(prompt) + len(ours), work["threads"], True)
        batch = lc.llama_batch_init(BATCH, 0, 1)
        forced = prompt + ours[:-1]
        entries = [(token, n, 0, n >= len(prompt) - 1) for n, token in enumerate(forced)]
        steps = []
        for place, token in zip(decode(context, batch, entries), ours, strict=True):
            logits = logits_of(context, place, lc.llama_vocab_n_tokens(vocab))
            best = int(logits.argmax())
            steps.append([best, float(logits[best]), float(logits[token])])
        found.append(steps)
        lc.llama_batch_free(batch)
        lc.llama_free(context)
    return found


def _ids(vocab: Any, text: str) -> list[int]:
    raw = text.encode()
    buffer = (lc.llama_token * (len(raw) + 8))()
    return list(
        buffer[: lc.llama_tokenize(vocab, raw, len(raw), buffer, len(raw) + 8, False, True)]
    )


if __name__ == "__main__":
    main()
