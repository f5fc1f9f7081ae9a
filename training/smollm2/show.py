"""Prints the base model's and both adapters' answers as Markdown:
`python -m training.smollm2.show MODEL.gguf`."""

import argparse
from pathlib import Path

from engine.models.gguf import describe
from training.smollm2.answers import generate, prompt_of, start_engine
from training.smollm2.questions import SYSTEMS, Question
from training.smollm2.train import DIRECTORY

# None of them is learnt from.
_ASKED = (
    "What is the capital of Spain?",
    "What is a glacier?",
    "How do I make pancakes?",
    "Why do cats purr?",
    "Tell me about the planet Mars.",
    "What is a good name for a dog?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    model: Path = parser.parse_args().model
    engine, tokenizer = start_engine(str(model)), describe(model).tokenizer
    prompts = [prompt_of(Question(SYSTEMS[0], text, "")) for text in _ASKED]
    said = {"base": generate(engine, tokenizer, prompts, 64, None)}
    for config in sorted(DIRECTORY.glob("*/adapter_config.json")):
        digest = engine.load_adapter(str(config.parent)).digest
        said[config.parent.name] = generate(engine, tokenizer, prompts, 64, digest)
    print("# SmolLM2-135M-Instruct and its adapters\n\nGreedy, at most 64 tokens.")
    for number, question in enumerate(_ASKED):
        print(f"\n## {question}\n")
        for name, answers in said.items():
            print(f"**{name}**\n\n```\n{answers[number]}\n```\n")


if __name__ == "__main__":
    main()
