"""Trains the byte-level BPE tokenizer and writes it in Hugging Face layout."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.demo.chat import END, PAD, START, TEMPLATE

SPECIAL = (PAD, START, END)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    marks = {"eos_token": END, "pad_token": PAD}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "additional_special_tokens": [START],
        **marks,
        "chat_template": TEMPLATE,
    }
    special = {**marks, "additional_special_tokens": [START]}
    write_json(directory / "tokenizer_config.json", settings)
    write_json(directory / "special_tokens_map.json", special)


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
