"""llama.cpp on a GGUF file as it is, for rates; or, given the files of a check, its ids and logits.

Stands alone: it runs in an environment without this project.

run_llama_cpp_file.py WORK.json                    asked for a rate at a time
run_llama_cpp_file.py WORK.json ANSWERS.json F32   compares; writes the model to F32 on the way
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import llama_cpp as lc
import numpy as np
from protocol import answer

_BATCH = 2048


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
    _rate(model, work, prompts[:1])
    answer(
        {
            "base": lambda: _rate(model, work, prompts),
            "one": lambda: _rate(model, work, prompts[:1]),
        }
    )


@lc.llama_log_callback
def _silent(*_: Any) -> None:
    """llama.cpp's log, hundreds of lines a context."""


def _load(path: str) -> Any:
    """Without the layouts made for AMX tiles where they end the process, as some hosts' tiles do."""
    params = lc.llama_model_default_params()
    params.use_extra_bufts = _survives(path)
    if not params.use_extra_bufts:
        print("llama.cpp: tiles end its process here: they are off", file=sys.stderr)
    return lc.llama_model_load_from_file(path.encode(), params)


def _survives(path: str) -> bool:
    """Whether a child process can compute a few tokens with all layouts."""
    child = os.fork()
    if child == 0:
        model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        context, batch = _context(model, 1, 16, 1), lc.llama_batch_init(16, 0, 1)
        _decode(context, batch, [(n, n, 0, n == 7) for n in range(8)])
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _check(work: dict[str, Any], target: Path, wide: Path) -> None:
    """On the file itself, where llama.cpp rounds activations to eight bits before each product, and
    on the same weights in float32, where it does not."""
    model = _load(work["model"])
    vocab = lc.llama_model_get_vocab(model)
    found: dict[str, Any] = {"ids": [_ids(vocab, text) for text in work["texts"]]}
    found["file"] = _forced(model, work)
    _write_float32(Path(work["model"]), wide)
    found["float32"] = _forced(_load(str(wide)), work)
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


def _forced(model: Any, work: dict[str, Any]) -> list[list[list[float]]]:
    """A sequence a prompt: at each of our tokens llama.cpp's best one, its logit, that of ours."""
    vocab = lc.llama_model_get_vocab(model)
    found = []
    for prompt, ours in zip(work["prompts"], work["answers"], strict=True):
        context = _context(model, 1, len(prompt) + len(ours), work["threads"], True)
        batch = lc.llama_batch_init(_BATCH, 0, 1)
        forced = prompt + ours[:-1]
        entries = [(token, n, 0, n >= len(prompt) - 1) for n, token in enumerate(forced)]
        steps = []
        for place, token in zip(_decode(context, batch, entries), ours, strict=True):
            logits = _logits(context, place, lc.llama_vocab_n_tokens(vocab))
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


def _context(model: Any, sequences: int, length: int, threads: int, exact: bool = False) -> Any:
    params = lc.llama_context_default_params()
    params.n_ctx = sequences * (length + 8)
    params.n_batch, params.n_ubatch = _BATCH, 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    if exact:
        params.type_k = params.type_v = lc.GGML_TYPE_F32
    return lc.llama_init_from_model(model, params)


def _rate(model: Any, work: dict[str, Any], prompts: list[list[int]]) -> float:
    """Output tokens a second, prompts together, greedy, end tokens ignored."""
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    length = len(prompts[0]) + work["output"]
    context = _context(model, len(prompts), length, work["threads"])
    batch = lc.llama_batch_init(_BATCH, 0, 1)
    start = time.perf_counter()
    last: list[int] = []
    together = max(1, _BATCH // len(prompts[0]))
    for first in range(0, len(prompts), together):
        entries = [
            (token, place, first + n, place == len(prompt) - 1)
            for n, prompt in enumerate(prompts[first : first + together])
            for place, token in enumerate(prompt)
        ]
        last += [int(_logits(context, n, vocab).argmax()) for n in _decode(context, batch, entries)]
    for step in range(work["output"] - 1):
        entries = [(token, len(prompts[0]) + step, n, True) for n, token in enumerate(last)]
        last = [int(_logits(context, n, vocab).argmax()) for n in _decode(context, batch, entries)]
    spent = time.perf_counter() - start
    lc.llama_batch_free(batch)
    lc.llama_free(context)
    return len(prompts) * work["output"] / spent


def _decode(context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> list[int]:
    """Runs (token, position, sequence, wants logits) entries; returns the places that have them."""
    batch.n_tokens = len(entries)
    for n, (token, place, sequence, wanted) in enumerate(entries):
        batch.token[n] = token
        batch.pos[n] = place
        batch.n_seq_id[n] = 1
        batch.seq_id[n][0] = sequence
        batch.logits[n] = wanted
    if lc.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    return [n for n, entry in enumerate(entries) if entry[3]]


def _logits(context: Any, place: int, vocab: int) -> Any:
    found = ctypes.cast(lc.llama_get_logits_ith(context, place), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(found, (vocab,))


if __name__ == "__main__":
    main()
