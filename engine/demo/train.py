"""Trains the demo model and its adapters from nothing: `python -m engine.demo.train`."""

import argparse
from random import Random

import torch
from tokenizers import Tokenizer

from engine.demo import settings
from engine.demo.batches import batches
from engine.demo.chat import written
from engine.demo.dialogues import make_dialogues
from engine.demo.fit import fit
from engine.demo.model import config_of, new_model, write_config, write_weights
from engine.demo.paths import ADAPTERS, MODEL_DIR
from engine.demo.recipe import record
from engine.demo.tokenizer import train_tokenizer, write_tokenizer
from engine.demo.tune import train_adapter

TOKENIZER_DIALOGUES = 8_000


def make_tokenizer() -> Tokenizer:
    texts = [written(one) for one in make_dialogues(TOKENIZER_DIALOGUES, settings.SEED)]
    for style in settings.STYLES:
        texts += [written(one) for one in make_dialogues(500, settings.SEED, style.name)]
    return train_tokenizer(texts, settings.VOCAB_SIZE)


def train_base() -> None:
    MODEL_DIR.mkdir(exist_ok=True)
    tokenizer = make_tokenizer()
    write_tokenizer(tokenizer, MODEL_DIR, settings.CONTEXT)
    config = config_of(tokenizer)
    write_config(config, MODEL_DIR)
    plan, model = settings.BASE, new_model(config)
    dialogues = make_dialogues(plan.dialogues, settings.SEED)
    steps = list(batches(dialogues, tokenizer, plan.tokens_per_step, Random(settings.SEED)))
    loss = fit(model.model, model.lm_head, model.parameters(), steps, plan)
    write_weights(model, MODEL_DIR)
    count = sum(weight.numel() for weight in model.parameters())
    record(parameters=count, base_loss=round(loss, 5))


def train_adapters(names: list[str]) -> None:
    losses = {}
    for style in settings.STYLES:
        if style.name in names:
            losses[style.name] = round(train_adapter(style, ADAPTERS[style.name]), 5)
            record(**{f"{style.name}_loss": losses[style.name]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["base", *ADAPTERS])
    parser.add_argument("--threads", type=int, default=2)
    wanted = parser.parse_args()
    torch.set_num_threads(wanted.threads)
    if "base" in wanted.parts:
        train_base()
    train_adapters(wanted.parts)


if __name__ == "__main__":
    main()
