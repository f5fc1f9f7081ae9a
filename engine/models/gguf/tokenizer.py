"""A GGUF file's tokenizer as a `tokenizers.Tokenizer`: byte-level BPE, or SentencePiece's BPE."""

from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from engine.json_fields import shown
from engine.models.gguf.fields import Fields
from engine.models.gguf.pretokenizers import splitting_of
from engine.models.gguf.tokens import Tokens

_SPACE = "\u2581"  # what SentencePiece writes for a blank


def build_tokenizer(fields: Fields, tokens: Tokens) -> Tokenizer:
    """Ids as llama.cpp gives them. Raises CheckpointError for a kind that is not supported."""
    kind = fields.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(fields, tokens)
    elif kind == "llama":
        tokenizer, adds_bos = _sentence_piece(fields, tokens), True
    else:
        raise fields.fail(f"tokenizer.ggml.model is {shown(kind)}; supported: gpt2, llama")
    tokenizer.add_special_tokens([_added(tokens, number, True) for number in tokens.control])
    tokenizer.add_tokens([_added(tokens, number, False) for number in tokens.user])
    _frame(fields, tokenizer, tokens, adds_bos)
    return tokenizer


def _added(tokens: Tokens, number: int, special: bool) -> AddedToken:
    return AddedToken(tokens.texts[number], special=special, normalized=False)


def _byte_level(fields: Fields, tokens: Tokens) -> tuple[Tokenizer, bool]:
    splitting = splitting_of(fields)
    merges = [_merge(fields, text) for text in fields.texts("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(_bpe(fields, tokens, merges, ignore_merges=splitting.whole_words))
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, splitting.adds_bos


def _merge(fields: Fields, text: str) -> tuple[str, str]:
    left, blank, right = text.partition(" ")
    if not (left and blank and right):
        raise fields.fail(f"tokenizer.ggml.merges holds {text!r}: two parts are needed")
    return left, right


def _bpe(
    fields: Fields, tokens: Tokens, merges: list[tuple[str, str]], **settings: Any
) -> models.BPE:
    for left, right in merges:
        absent = next(
            (part for part in (left, right, left + right) if part not in tokens.ids), None
        )
        if absent is not None:
            raise fields.fail(f"merge {left!r} + {right!r} needs {absent!r}, which is not a token")
    return models.BPE(vocab=tokens.ids, merges=merges, **settings)


def _sentence_piece(fields: Fields, tokens: Tokens) -> Tokenizer:
    unknown = tokens.texts[tokens.roles["unk_token"]] if "unk_token" in tokens.roles else None
    model = _bpe(
        fields, tokens, _merges_by_score(fields, tokens),
        unk_token=unknown, fuse_unk=True, byte_fallback=True,
    )  # fmt: skip
    tokenizer = Tokenizer(model)
    blanks = normalizers.Replace(" ", _SPACE)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if fields.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), blanks])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = blanks
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(fields: Fields, tokens: Tokens) -> list[tuple[str, str]]:
    """SentencePiece joins whichever two neighbours make the piece of the highest score: all splits
    of each piece into two pieces, by the score of the whole."""
    scores = fields.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens.texts):
        raise fields.fail(f"tokenizer.ggml.scores is not an array of {len(tokens.texts)} numbers")
    ids, apart = tokens.ids, {*tokens.control, *tokens.user}
    merges: list[tuple[str, str]] = []
    for number in np.argsort(-scores, kind="stable").tolist():
        text = tokens.texts[number]
        if number in apart or len(text) < 2:
            continue
        splits = [(text[:at], text[at:]) for at in range(1, len(text))]
        known = [(left, right) for left, right in splits if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _frame(fields: Fields, tokenizer: Tokenizer, tokens: Tokens, adds_bos: bool) -> None:
    """BOS before and EOS behind a bare prompt, as the file asks."""
    wanted = {
        "bos_token": fields.flag("tokenizer.ggml.add_bos_token", adds_bos),
        "eos_token": fields.flag("tokenizer.ggml.add_eos_token", False),
    }
    added = {name: tokens.roles[name] for name in wanted if wanted[name] and name in tokens.roles}
    if not added:
        return
    text = {name: tokens.texts[number] for name, number in added.items()}
    before = [text["bos_token"]] if "bos_token" in text else []
    behind = [text["eos_token"]] if "eos_token" in text else []
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *behind],
        special_tokens=[(tokens.texts[number], number) for number in set(added.values())],
    )
