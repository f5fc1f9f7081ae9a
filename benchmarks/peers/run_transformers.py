"""`transformers` on the work: one static batch through `generate`.

Stands alone: it runs in an environment without this project.
"""

import json
import sys
import time

import torch
from protocol import answer
from transformers import AutoModelForCausalLM


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    torch.set_num_threads(work["threads"])
    dtype = torch.bfloat16 if work["bfloat16"] else torch.float32
    model = AutoModelForCausalLM.from_pretrained(work["checkpoint"], dtype=dtype).eval()
    prompts, output = work["prompts"], work["output"]

    def rate(asked: list[list[int]]) -> float:
        ids = torch.tensor(asked)
        start = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        spent = time.perf_counter() - start
        assert made.shape[1] == ids.shape[1] + output
        return len(asked) * output / spent

    with torch.inference_mode():
        rate(prompts[:1])
        answer({"base": lambda: rate(prompts), "one": lambda: rate(prompts[:1])})


if __name__ == "__main__":
    main()
