"""vLLM's CPU build on the work: with LoRA off, then on with four adapters. Prints rates as JSON.

Stands alone: it runs in an environment without this project, one process for each engine, since
an engine holds its memory until its process ends.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    if len(sys.argv) == 3:
        print(json.dumps(_base(work) if sys.argv[2] == "base" else _adapters(work)))
        return
    found: dict[str, float] = {}
    for part in ("base", "adapters"):
        command = [sys.executable, __file__, sys.argv[1], part]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=3000)
        lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        if ran.returncode == 0 and lines:
            found |= json.loads(lines[-1])
    print(json.dumps(found))


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


def _base(work: dict[str, Any]) -> dict[str, float]:
    llm, prompts = _engine(work), work["prompts"]
    _rate(llm, work, prompts[:2])
    repeats = range(work["repeats"])
    return {
        "base": statistics.median(_rate(llm, work, prompts) for _ in repeats),
        "one": statistics.median(_rate(llm, work, prompts[:1]) for _ in repeats),
    }


def _adapters(work: dict[str, Any]) -> dict[str, float]:
    from vllm.lora.request import LoRARequest

    llm = _engine(work, enable_lora=True, max_loras=4, max_lora_rank=16)
    requests = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(work["adapters"][:4])]
    prompts = work["prompts"]
    used = [requests[n % 4] for n in range(len(prompts))]
    _rate(llm, work, prompts[:4], used[:4])
    rates = [_rate(llm, work, prompts, used) for _ in range(max(1, work["repeats"] - 2))]  # minutes
    return {"lora4": statistics.median(rates)}


if __name__ == "__main__":
    main()
