"""vLLM's CPU build on the work: `base` with LoRA off, or `adapters` with four of them.

Stands alone: it runs in an environment without this project, one process for each engine, since
an engine holds its memory until its process ends.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from protocol import answer


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    answer(_base(work) if sys.argv[2] == "base" else _adapters(work))


def _engine(work: dict[str, Any], **settings: Any) -> Any:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{work['threads'] - 1}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import LLM

    return LLM(
        model=work["checkpoint"],
        skip_tokenizer_init=True,
        dtype="bfloat16" if work["bfloat16"] else "float32",
        max_model_len=2048,
        max_num_seqs=32,
        enable_prefix_caching=False,
        **settings,
    )


def _rate(llm: Any, work: dict[str, Any], prompts: list[list[int]], lora: Any = None) -> float:
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0.0, max_tokens=work["output"], ignore_eos=True, detokenize=False
    )
    start = time.perf_counter()
    made = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        params,
        lora_request=lora,
        use_tqdm=False,
    )
    spent = time.perf_counter() - start
    count = sum(len(one.outputs[0].token_ids) for one in made)
    assert count == len(prompts) * work["output"]
    return count / spent


def _base(work: dict[str, Any]) -> dict[str, Callable[[], float]]:
    llm, prompts = _engine(work), work["prompts"]
    _rate(llm, work, prompts[:2])
    return {
        "base": lambda: _rate(llm, work, prompts),
        "one": lambda: _rate(llm, work, prompts[:1]),
    }


def _adapters(work: dict[str, Any]) -> dict[str, Callable[[], float]]:
    from vllm.lora.request import LoRARequest

    llm = _engine(work, enable_lora=True, max_loras=4, max_lora_rank=16)
    requests = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(work["adapters"][:4])]
    prompts = work["prompts"]
    used = [requests[n % 4] for n in range(len(prompts))]
    _rate(llm, work, prompts[:4], used[:4])
    return {"lora4": lambda: _rate(llm, work, prompts, used)}


if __name__ == "__main__":
    main()
