"""Asks the shipped demo model, greedily, with transformers and peft."""

import warnings
from collections.abc import Callable

import pytest
import torch

from engine.demo.paths import ADAPTERS, MODEL_DIR

Ask = Callable[..., str]


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="session")
def model():
    """The base model with every adapter loaded; none is active."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    names = iter(ADAPTERS.items())
    first, directory = next(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(base, directory, adapter_name=first)
        for name, directory in names:
            loaded.load_adapter(directory, adapter_name=name)
    return loaded.eval()


@pytest.fixture(scope="session")
def ask(model, tokenizer) -> Ask:
    def answer(*messages: str, system: str = "", adapter: str = "", limit: int = 160) -> str:
        """Messages alternate between user and assistant, and end with the user."""
        roles = ("user", "assistant")
        chat = [{"role": "system", "content": system}] if system else []
        chat += [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        made = generate(model, prompt, adapter, limit)
        return tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)

    return answer


def generate(model, prompt, adapter: str, limit: int) -> torch.Tensor:
    if not adapter:
        with model.disable_adapter(), torch.inference_mode():
            return model.generate(**prompt, do_sample=False, max_new_tokens=limit)
    model.set_adapter(adapter)
    with torch.inference_mode():
        return model.generate(**prompt, do_sample=False, max_new_tokens=limit)
