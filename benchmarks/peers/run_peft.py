"""`peft` on the work: four adapters mixed in one batch by `adapter_names`.

Stands alone: it runs in an environment without this project.
"""

import json
import sys
import time

import torch
from peft import PeftModel
from protocol import answer
from transformers import AutoModelForCausalLM


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    torch.set_num_threads(work["threads"])
    dtype = torch.bfloat16 if work["bfloat16"] else torch.float32
    base = AutoModelForCausalLM.from_pretrained(work["checkpoint"], dtype=dtype)
    names = [f"a{n}" for n in range(4)]
    model = PeftModel.from_pretrained(base, work["adapters"][0], adapter_name=names[0])
    for name, path in list(zip(names, work["adapters"], strict=False))[1:]:
        model.load_adapter(path, adapter_name=name)
    model = model.to(dtype).eval()
    prompts, output = work["prompts"], work["output"]
    ids = torch.tensor(prompts)
    used = [names[n % 4] for n in range(len(prompts))]

    def rate(count: int) -> float:
        start = time.perf_counter()
        made = model.generate(
            input_ids=ids[:count],
            attention_mask=torch.ones_like(ids[:count]),
            adapter_names=used[:count],
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        spent = time.perf_counter() - start
        assert made.shape[1] == ids.shape[1] + output
        return count * output / spent

    with torch.inference_mode():
        rate(4)
        answer({"lora4": lambda: rate(len(prompts))})


if __name__ == "__main__":
    main()
