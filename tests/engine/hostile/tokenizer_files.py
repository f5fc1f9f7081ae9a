"""`tokenizer.json`, `tokenizer_config.json` and chat templates."""

import json
import random
from pathlib import Path
from typing import Any

from tests.engine.hostile.case import Case, Draw
from tests.engine.hostile.odd_values import (
    BROKEN,
    at,
    changed,
    odd,
    places,
    shown,
    without,
    written,
)

_TOKENIZER, _SETTINGS, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_FAMILY = "LlamaForCausalLM"


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


def _token(number: int, text: str, **changes: Any) -> dict[str, Any]:
    return {
        "id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    } | changes  # fmt: skip


_PATTERNS = (
    "(a+)+$", "(a|a)*$", "(a*)*b", "(?:a?){30}a{30}", "(", "(?R)", "(?<=a+)b", r"\p{Bogus}", "a{100000}",
    "(?:a{1000}){1000}", "[", r"(.*)*x\1", "", "(x+x+)+y",
)  # fmt: skip
_PARTS: tuple[tuple[str, Any], ...] = (
    *(("pre_tokenizer", {"type": "Sequence", "pretokenizers": [_split(each)]}) for each in _PATTERNS),
    *(("normalizer", {"type": "Replace", "pattern": {"Regex": each}, "content": "b"})
      for each in _PATTERNS[:6]),
    ("normalizer", {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 12}),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "b"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    ("normalizer", {"type": "Prepend", "prepend": ""}),
    ("pre_tokenizer", None),
    ("pre_tokenizer", {"type": "FixedLength", "length": 0}),
    ("decoder", None),
    ("decoder", {"type": "CTC", "pad_token": "<s>", "word_delimiter_token": "|", "cleanup": True}),
    ("decoder", {"type": "Strip", "content": "a", "start": 10**9, "stop": 10**9}),
    ("decoder", {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}),
    ("model", {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
               "max_input_chars_per_word": 100, "vocab": {"<unk>": 0, "a": 1}}),
    ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0]]}),
    ("model", {"type": "Unigram", "unk_id": 5, "vocab": []}),
    ("model", {"type": "WordLevel", "unk_token": "<unk>", "vocab": {"<unk>": 0}}),
    ("model", None),
    ("post_processor", {"type": "TemplateProcessing",
                        "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 50,
                        "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}}),
    ("post_processor", {"type": "TemplateProcessing", "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [999999], "tokens": ["<s>"]}}}),
    ("truncation", {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 50}),
    ("padding", {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
                 "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}),
    ("added_tokens", {}),
    *(("+added_tokens", [_token(number, "<big>")]) for number in (100000, 2**31, 2**32 - 1, 2**40, -1)),
    ("+added_tokens", [_token(267 + n, f"<t{n}>") for n in range(5_000)]),
    ("+added_tokens", [_token(270, "")]), ("+added_tokens", [_token(265, "<other>")]),
    ("+added_tokens", [_token(280, "<s>")]), ("+added_tokens", [_token(270, "a")]),
    ("+added_tokens", [_token(270, " ")]), ("+added_tokens", [_token(270, "x" * 1_000_000)]),
    ("+added_tokens", [_token(270, "hello", lstrip=True, rstrip=True, normalized=True)]),
)  # fmt: skip
_TEMPLATES = (
    *Path(__file__).with_name("templates.txt").read_text(encoding="utf-8").splitlines(),
    "", "\0", "{{ '\ud83d' }}", "{{ " + "1" * 5000 + " }}", "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
)  # fmt: skip


def tokenizer_cases(bases: Path) -> Draw:
    base = bases / _FAMILY
    tokenizer = json.loads((base / _TOKENIZER).read_text())
    settings = json.loads((base / _SETTINGS).read_text())
    inner, outer = places(tokenizer, 2000), places(settings)

    def _draw(draw: random.Random) -> Case:
        kind = draw.random()
        if kind < 0.4:
            name, tree = _mutated(draw, tokenizer, draw.choice(inner))
            return _case(name, base, {_TOKENIZER: written(tree)})
        if kind < 0.55:
            field, part = draw.choice(_PARTS)
            bare = field.removeprefix("+")
            whole = tokenizer[bare] + part if field != bare else part
            name = f"{field} = {shown(part)}"
            return _case(name, base, {_TOKENIZER: written(tokenizer | {bare: whole})})
        if kind < 0.72:
            name, tree = _mutated(draw, settings, draw.choice(outer))
            return _case(name, base, {_SETTINGS: written(tree)})
        if kind < 0.92:
            text = draw.choice(_TEMPLATES)
            if draw.random() < 0.4:
                text += draw.choice(_TEMPLATES)
            raw = text.encode(errors="replace")
            files = {_TEMPLATE: raw}
            if draw.random() < 0.5:
                given = {"chat_template": raw.decode()}
                files = {_SETTINGS: written(settings | given)}
            return _case(f"template {shown(text)}", base, files)
        file, name = draw.choice((_TOKENIZER, _SETTINGS, _TEMPLATE)), draw.choice(list(BROKEN))
        return _case(f"{file} is {name}", base, {file: BROKEN[name]})

    return _draw


def _mutated(draw: random.Random, tree: Any, path: tuple[str | int, ...]) -> tuple[str, Any]:
    label = shown(".".join(map(str, path)))
    if draw.random() < 0.15:
        return f"{label} absent", without(tree, path)
    value = odd(draw, at(tree, path))
    return f"{label} = {shown(value)}", changed(tree, path, value)


def _case(name: str, base: Path, files: dict[str, bytes]) -> Case:
    return Case(name, base, files, (), places=frozenset(("chat template", "tokenizer")))
