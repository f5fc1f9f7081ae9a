"""Turns dialogues into padded batches of token ids, with a mask of the positions to learn."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import torch
from tokenizers import Tokenizer

from training.demo.chat import END, PAD, Dialogue, head

SORTED_TOGETHER = 1024


@dataclass(frozen=True)
class Example:
    """Token ids, and for each whether it counts in the loss."""

    ids: list[int]
    learnt: list[bool]


@dataclass(frozen=True)
class Batch:
    """ids [rows, length]; learnt [rows, length - 1] marks the next tokens that count in the loss."""

    ids: torch.Tensor
    learnt: torch.Tensor


def encode(dialogue: Dialogue, tokenizer: Tokenizer) -> Example:
    """Only the assistant's text and its end token count in the loss."""
    ids: list[int] = []
    learnt: list[bool] = []
    for turn in dialogue:
        before = tokenizer.encode(head(turn)).ids
        body = tokenizer.encode(f"{turn.text}{END}").ids
        after = tokenizer.encode("\n").ids
        ids += before + body + after
        teaches = turn.role == "assistant"
        learnt += [False] * len(before) + [teaches] * len(body) + [False] * len(after)
    return Example(ids, learnt)


def opening_of(example: Example, length: int) -> Example:
    """The dialogue up to the first tokens of its answer, which show whether it was understood."""
    end = example.learnt.index(True) + length
    return Example(example.ids[:end], example.learnt[:end])


def pad(examples: list[Example], filler: int) -> Batch:
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), filler)
    learnt = torch.zeros((len(examples), length), dtype=torch.bool)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        learnt[row, : len(example.ids)] = torch.tensor(example.learnt)
    return Batch(ids, learnt[:, 1:])


def batches(
    dialogues: list[Dialogue],
    tokenizer: Tokenizer,
    tokens_per_step: int,
    random: Random,
    opening: int | None = None,
) -> Iterator[Batch]:
    """Batches of dialogues of similar length, shuffled, each within tokens_per_step.

    With `opening` only so many tokens of each dialogue's first answer are kept.
    """
    (filler,) = tokenizer.encode(PAD).ids
    for start in range(0, len(dialogues), SORTED_TOGETHER):
        some = [encode(one, tokenizer) for one in dialogues[start : start + SORTED_TOGETHER]]
        if opening:
            some = [opening_of(example, opening) for example in some]
        some.sort(key=lambda example: len(example.ids))
        groups = list(cut(some, tokens_per_step))
        random.shuffle(groups)
        yield from (pad(group, filler) for group in groups)


def cut(examples: list[Example], tokens_per_step: int) -> Iterator[list[Example]]:
    """Cuts a list, shortest first, where the padded batch would pass tokens_per_step."""
    group: list[Example] = []
    for example in examples:
        if group and len(example.ids) * (len(group) + 1) > tokens_per_step:
            yield group
            group = []
        group.append(example)
    if group:
        yield group
