"""Asks the shipped demo model, greedily, with transformers and peft."""

import warnings
from collections.abc import Callable

import pytest
import torch

from engine.demo.paths import ADAPTERS, MODEL_DIR

Conversation = list[dict[str, str]]
AskAll = Callable[..., list[str]]
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
def ask_all(model, tokenizer) -> AskAll:
    """All in one batch: the time goes into Python's steps, of which the longest answer has 160."""
    tokenizer.padding_side = "left"

    def answer(conversations: list[Conversation], adapter: str = "", limit: int = 160) -> list[str]:
        prompt = tokenizer.apply_chat_template(
            conversations,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
        )
        made = generate(model, prompt, adapter, limit)[:, prompt["input_ids"].shape[1] :]
        return [str(text) for text in tokenizer.batch_decode(made, skip_special_tokens=True)]

    return answer


@pytest.fixture(scope="session")
def ask(ask_all) -> Ask:
    return lambda *messages: ask_all([conversation(*messages)])[0]


def conversation(*messages: str, system: str = "") -> Conversation:
    """Messages alternate between user and assistant, and end with the user."""
    roles = ("user", "assistant")
    chat = [{"role": "system", "content": system}] if system else []
    return chat + [{"role": roles[n % 2], "content": text} for n, text in enumerate(messages)]


def generate(model, prompt, adapter: str, limit: int) -> torch.Tensor:
    if not adapter:
        with model.disable_adapter(), torch.inference_mode():
            return model.generate(**prompt, do_sample=False, max_new_tokens=limit)
    model.set_adapter(adapter)
    with torch.inference_mode():
        return model.generate(**prompt, do_sample=False, max_new_tokens=limit)
