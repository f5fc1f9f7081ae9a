"""Trains the demo model and its adapters from scratch: `python -m training.demo.train`."""

import argparse
from functools import partial
from random import Random

from tokenizers import Tokenizer

from engine.demo.paths import ADAPTERS, MODEL_DIR
from training.demo import distributed, settings
from training.demo.batches import batches
from training.demo.chat import written
from training.demo.dialogues import make_dialogues, make_openings
from training.demo.fit import fit
from training.demo.model import (
    config_of,
    load_model,
    load_tokenizer,
    new_model,
    write_config,
    write_weights,
)
from training.demo.recipe import record
from training.demo.styles import WORDY_STYLES
from training.demo.tokenizer import train_tokenizer, write_tokenizer
from training.demo.tune import train_adapter

TOKENIZER_DIALOGUES = 8_000


def make_tokenizer() -> Tokenizer:
    texts = [written(one) for one in make_dialogues(TOKENIZER_DIALOGUES, settings.SEED)]
    for style in WORDY_STYLES:
        texts += [written(one) for one in make_dialogues(500, settings.SEED, style)]
    return train_tokenizer(texts, settings.VOCAB_SIZE)


def train_base() -> None:
    tokenizer = make_tokenizer()
    config = config_of(tokenizer)
    plan, model = settings.BASE, new_model(config)
    dialogues = make_dialogues(plan.dialogues, settings.SEED)
    steps = list(batches(dialogues, tokenizer, plan.tokens_per_step, Random(settings.SEED)))
    loss = fit(model.model, model.lm_head, model.parameters(), steps, plan)
    if distributed.rank() == 0:
        MODEL_DIR.mkdir(exist_ok=True)
        write_tokenizer(tokenizer, MODEL_DIR, settings.CONTEXT)
        write_config(config, MODEL_DIR)
        write_weights(model, MODEL_DIR)
        count = sum(weight.numel() for weight in model.parameters())
        record(parameters=count, base_loss=round(loss, 5))
    distributed.barrier()


def polish_base() -> None:
    """Continues with hurried questions, most of them cut after the first tokens of the answer."""
    plan, model, tokenizer = settings.POLISH, load_model(), load_tokenizer()
    random = Random(settings.SEED)
    whole = make_dialogues(plan.dialogues, settings.SEED + 1, hurried=True)
    openings = make_openings(plan.openings, settings.SEED + 2)
    size, cut = plan.tokens_per_step, settings.OPENING_TOKENS
    steps = [
        *batches(whole, tokenizer, size, random),
        *batches(openings, tokenizer, size, random, cut),
    ]
    random.shuffle(steps)
    loss = fit(model.model, model.lm_head, model.parameters(), steps, plan)
    if distributed.rank() == 0:
        write_weights(model, MODEL_DIR)
        record(polish_loss=round(loss, 5))
    distributed.barrier()


def train(parts: list[str]) -> None:
    if "base" in parts:
        train_base()
    if "polish" in parts:
        polish_base()
    for style in settings.STYLES:
        if style.name in parts:
            train_adapter(style, ADAPTERS[style.name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["base", "polish", *ADAPTERS])
    parts = parser.parse_args().parts
    distributed.run(partial(train, parts), settings.PROCESSES)


if __name__ == "__main__":
    main()
