"""Batches on llama.cpp by its C interface: contexts, decoding and rates, greedy.

Stands alone: it runs in an environment without this project.
"""

import ctypes
import os
import time
from typing import Any

import llama_cpp as lc
import numpy as np

BATCH = 2048
Entry = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


def make_context(model: Any, sequences: int, length: int, threads: int, exact: bool = False) -> Any:
    """`length` is that of each sequence, in tokens; `exact` keeps keys and values in float32."""
    params = lc.llama_context_default_params()
    params.n_ctx = sequences * (length + 8)
    params.n_batch, params.n_ubatch = BATCH, 512
    params.n_seq_max = sequences
    params.n_threads = params.n_threads_batch = threads
    params.kv_unified = False
    if exact:
        params.type_k = params.type_v = lc.GGML_TYPE_F32
    return lc.llama_init_from_model(model, params)


def decode(context: Any, batch: Any, entries: list[Entry]) -> list[int]:
    """Runs the entries; returns the indices of those that have logits."""
    batch.n_tokens = len(entries)
    for n, (token, position, sequence, wanted) in enumerate(entries):
        batch.token[n] = token
        batch.pos[n] = position
        batch.n_seq_id[n] = 1
        batch.seq_id[n][0] = sequence
        batch.logits[n] = wanted
    if lc.llama_decode(context, batch) != 0:
        raise RuntimeError("llama_decode failed")
    return [n for n, entry in enumerate(entries) if entry[3]]


def logits_of(context: Any, index: int, vocab: int) -> Any:
    """Float32, [vocab]."""
    found = ctypes.cast(lc.llama_get_logits_ith(context, index), ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(found, (vocab,))


def rate(model: Any, work: dict[str, Any], prompts: list[list[int]]) -> float:
    """Output tokens per second of all prompts together, which have one length. End tokens do not
    end a sequence."""
    vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
    length = len(prompts[0])
    context = make_context(model, len(prompts), length + work["output"], work["threads"])
    batch = lc.llama_batch_init(BATCH, 0, 1)
    start = time.perf_counter()
    last: list[int] = []
    together = max(1, BATCH // length)  # whole prompts, as many as a batch holds at a time
    for first in range(0, len(prompts), together):
        entries = [
            (token, position, first + n, position == len(prompt) - 1)
            for n, prompt in enumerate(prompts[first : first + together])
            for position, token in enumerate(prompt)
        ]
        last += _best(context, batch, entries, vocab)
    for step in range(work["output"] - 1):
        entries = [(token, length + step, n, True) for n, token in enumerate(last)]
        last = _best(context, batch, entries, vocab)
    spent = time.perf_counter() - start
    lc.llama_batch_free(batch)
    lc.llama_free(context)
    return len(prompts) * work["output"] / spent


def _best(context: Any, batch: Any, entries: list[Entry], vocab: int) -> list[int]:
    """The next token of each entry whose logits are wanted."""
    found = decode(context, batch, entries)
    return [int(logits_of(context, n, vocab).argmax()) for n in found]


def survives_tiles(path: str) -> bool:
    """Whether a child process can compute a few tokens with all layouts, also those for AMX tiles,
    which end the process on some hosts."""
    child = os.fork()
    if child == 0:
        model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        context, batch = make_context(model, 1, 16, 1), lc.llama_batch_init(16, 0, 1)
        decode(context, batch, [(n, n, 0, n == 7) for n in range(8)])
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0
