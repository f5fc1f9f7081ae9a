"""Trains the two adapters on a CPU in minutes: `python -m training.smollm2.train MODEL.gguf`.

MODEL.gguf is SmolLM2-135M-Instruct. Needs torch alone; the data is made by the base model.
"""

import argparse
import json
import time
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from engine.demo.paths import DEMO_DIR
from engine.models.gguf import describe
from training.demo.chat import END
from training.demo.fit import rate_at
from training.demo.settings import Schedule
from training.smollm2.answers import STYLES, plain_answers, prompt_of
from training.smollm2.network import ALPHA, FIRST_LAYER, RANK, TARGETS, Network
from training.smollm2.questions import Question, make_questions

SEED, QUESTIONS, EPOCHS, TOGETHER = 2024, 280, 2, 8
DIRECTORY = DEMO_DIR / "smollm2"
Example = tuple[list[int], int]  # ids, and where the answer begins


def examples(
    tokenizer: Tokenizer, style: str, questions: list[Question], answers: list[str]
) -> list[Example]:
    made = []
    for question, answer in zip(questions, answers, strict=True):
        if not answer:
            continue
        prompt = tokenizer.encode(prompt_of(question), add_special_tokens=False).ids
        said = STYLES[style](answer, question.topic) + END
        made.append((prompt + tokenizer.encode(said, add_special_tokens=False).ids, len(prompt)))
    return made


def loss_of(network: Network, batch: list[Example]) -> torch.Tensor:
    """Mean cross entropy over the answers' tokens."""
    longest = max(len(ids) for ids, _ in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    wanted = torch.zeros(len(batch), longest, dtype=torch.bool)  # positions that foretell an answer
    for row, (tokens, start) in enumerate(batch):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        wanted[row, start - 1 : len(tokens) - 1] = True
    logits = network.logits(ids[:, :-1], wanted[:, :-1])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][wanted[:, :-1]])


def train(network: Network, made: list[Example], schedule: Schedule) -> float:
    """Returns the mean loss of the last tenth."""
    random, losses = Random(SEED), []
    steps = [batch for _ in range(EPOCHS) for batch in _shuffled(made, random)]
    optimiser = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began = time.monotonic()
    for step, batch in enumerate(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate_at((step + 1) / len(steps), schedule)
        loss = loss_of(network, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), schedule.clip)
        optimiser.step()
        optimiser.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9 or step + 1 == len(steps):
            mean, spent = sum(losses[-10:]) / len(losses[-10:]), time.monotonic() - began
            print(f"step {step + 1}/{len(steps)} loss {mean:.4f} after {spent:.0f} s", flush=True)
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _shuffled(made: list[Example], random: Random) -> list[list[Example]]:
    """Batches of like lengths, in random order."""
    ordered = sorted(made, key=lambda example: (len(example[0]), random.random()))
    batches = [ordered[at : at + TOGETHER] for at in range(0, len(ordered), TOGETHER)]
    random.shuffle(batches)
    return batches


def save(network: Network, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, (a, b) in network.lora.items():
        for half, tensor in (("A", a), ("B", b)):
            key = f"base_model.model.{name}.lora_{half}.weight"
            tensors[key] = tensor.detach().half().contiguous()
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "layers_to_transform": list(range(FIRST_LAYER, network.config["num_hidden_layers"])),
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    text = json.dumps(config, indent=2) + "\n"
    (directory / "adapter_config.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("styles", nargs="*", default=list(STYLES))
    chosen = parser.parse_args()
    described = describe(chosen.model)
    questions = make_questions(QUESTIONS, SEED)
    answers = plain_answers(str(chosen.model), described.tokenizer, questions)
    print(f"{sum(map(bool, answers))} answers of the base model", flush=True)
    schedule = Schedule(dialogues=QUESTIONS, learning_rate=2e-3)
    for style in chosen.styles:
        network = Network(chosen.model, described.config, SEED)
        made = examples(described.tokenizer, style, questions, answers)
        loss = train(network, made, schedule)
        save(network, DIRECTORY / style)
        print(f"{style}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
