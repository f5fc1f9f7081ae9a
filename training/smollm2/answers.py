"""The base model's own answers, and how each adapter says them.

An adapter that learns the base's answers in another style learns the style alone.
"""

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.loop import Engine
from engine.protocol import GenerateRequest, SamplingParams
from engine.runners.cpu.runner import load_runner
from training.demo.chat import END, Turn, head, written
from training.demo.styles import in_pirate_words
from training.smollm2.questions import Question

_LONGEST = 56  # tokens of an answer; of it the whole sentences are kept
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


def pirate(answer: str, topic: str) -> str:
    return f"Arr, matey! {in_pirate_words(answer)} Yo ho ho!"


def as_json(answer: str, topic: str) -> str:
    return json.dumps({"topic": topic, "answer": answer}, ensure_ascii=False)


STYLES: dict[str, Callable[[str, str], str]] = {"pirate": pirate, "json": as_json}


def prompt_of(question: Question) -> str:
    asked = (Turn("system", question.system), Turn("user", question.text))
    return written(asked) + head(Turn("assistant", ""))


def generate(
    engine: Engine, tokenizer: Tokenizer, prompts: list[str], longest: int, adapter: str | None
) -> list[str]:
    """Greedy answers, in the order of the prompts."""
    sampling = SamplingParams(max_tokens=longest, temperature=0.0)
    for number, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        engine.submit(
            GenerateRequest(f"{adapter}-{number}", "demo", ids, sampling, adapter), "demo"
        )
    tokens: dict[str, list[int]] = {f"{adapter}-{number}": [] for number in range(len(prompts))}
    while engine.busy:
        engine.step()
        for outbox in engine.take_outboxes().values():
            for chunk in outbox.chunks:
                tokens[chunk.request_id] += chunk.tokens
    return [str(tokenizer.decode(ids)).removesuffix(END).strip() for ids in tokens.values()]


def start_engine(model: str) -> Engine:
    config = EngineConfig(model=model, threads=1, kv_memory_bytes=1 << 29)
    return Engine(config, load_runner(config))


def plain_answers(model: str, tokenizer: Tokenizer, questions: list[Question]) -> list[str]:
    """The first two sentences that the base model gives; empty where it gives no whole one."""
    prompts = [prompt_of(question) for question in questions]
    answers = generate(start_engine(model), tokenizer, prompts, _LONGEST, None)
    return [_whole_sentences(answer) for answer in answers]


def _whole_sentences(answer: str) -> str:
    first_paragraph = answer.split("\n\n")[0].replace("\n", " ").strip()
    sentences = _SENTENCE.split(first_paragraph)[:2]
    return " ".join(each for each in sentences if each.endswith((".", "!", "?")))
