"""How `tokenizer.ggml.pre` splits a text before byte-level BPE.

Each is checked against llama.cpp's ids by `python -m benchmarks.real_model --check`; the patterns
are those of the models' own `tokenizer.json`.
"""

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from engine.json_fields import shown
from engine.models.gguf.fields import Fields

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """`whole_words`: a piece that is a token itself is not merged from its parts."""

    pattern: str = ""  # empty: GPT-2's
    digits: bool = False  # each digit is a piece of its own
    whole_words: bool = False
    adds_bos: bool = False  # where tokenizer.ggml.add_bos_token is absent
    composes: bool = False  # Unicode NFC first

    def pre_tokenizer(self) -> PreTokenizer:
        if self.pattern:
            split = Split(Regex(self.pattern), "isolated")
            return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
        gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
        return Sequence([Digits(individual_digits=True), gpt2]) if self.digits else gpt2


_GPT2 = Splitting()
_DIGITS = Splitting(digits=True)
_LLAMA = Splitting(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN = Splitting(_QWEN2, composes=True)
_KNOWN = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": Splitting(_TEKKEN, whole_words=True, adds_bos=True),
}


def splitting_of(fields: Fields) -> Splitting:
    name = fields.values.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in _KNOWN:
        raise fields.fail(f"tokenizer.ggml.pre is {shown(name)}; supported: {', '.join(_KNOWN)}")
    return _KNOWN[name]
