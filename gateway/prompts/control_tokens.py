"""Prevents control-token injection: text from a client never becomes a control token.

A chat template marks roles with tokens such as `<|im_end|>`. The same characters in a message, a
tool or a name must not become those tokens, or a client could end its own turn and impersonate the
system role. When a client's string contains such characters, they are hidden from the template, and
the prompt is encoded by a copy of the tokenizer whose control tokens have unguessable names. Text
without them is encoded directly; both ways give the same ids.
"""

import json
import re
import secrets
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import orjson
from ahocorasick_rs import BytesAhoCorasick
from tokenizers import Tokenizer

from core.errors import BadRequest

# Role markers that some publishers do not flag as special: <|user|>, <｜User｜>. This excludes tags
# such as <think> and <tool_call>, which models read and write as text.
_MARKER = re.compile(r"<[|｜].*[|｜]>")
_GUARD = "\U0010f8ff"
_PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Disarmed:
    """A chat with its control tokens replaced by `mark`, the token's index, `mark`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    mark: str


class ControlTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        chosen = {
            token.content: number
            for number, token in added.items()
            if token.content and (token.special or _MARKER.fullmatch(token.content))
        }
        self._tokenizer = tokenizer
        self._texts = sorted(chosen, key=len, reverse=True)
        self._ids = chosen
        self._finder = BytesAhoCorasick([_in_json(text) for text in self._texts])
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if chosen else None
        # Unguessable, so that no client can write the control tokens of the copy.
        self._name = f"{_GUARD}{secrets.token_hex(16)}:"
        self._folds = tokenizer.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in chosen
        )
        self._twin: Tokenizer | None = None
        self._lock = threading.Lock()

    def occur_in(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> bool:
        """Whether a string of the client contains a control token. Join the parts of a message's
        content first: a token can be split over two parts."""
        written = orjson.dumps((messages, tools))
        if self._finder.find_matches_as_indexes(written):
            return True
        return self._folds and self._appear_when_folded(written.decode())

    def disarm(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> Disarmed:
        used = set(json.dumps((messages, tools), ensure_ascii=False))
        mark = next(chr(point) for point in _PRIVATE if chr(point) not in used)
        return Disarmed(self._hidden(messages, mark), self._hidden(tools, mark), mark)

    def encode(self, rendered: str, mark: str) -> list[int]:
        """The token ids of a rendered `Disarmed` chat. The first call blocks for seconds with a large
        vocabulary."""
        assert self._pattern is not None
        marked = re.compile(f"{mark}([0-9]+){mark}|{self._pattern.pattern}")
        wanted: Counter[int] = Counter()

        def _swap(found: re.Match[str]) -> str:
            if found[1] is not None:
                return self._texts[int(found[1])]
            number = self._ids[found[0]]
            wanted[number] += 1
            return self._twin_name(number)

        text = marked.sub(_swap, rendered)
        ids = list(self._guarded().encode(text, add_special_tokens=False).ids)
        control = set(self._ids.values())
        if Counter(each for each in ids if each in control) != wanted:
            raise _no_text()
        return ids

    def _hidden(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(lambda m: f"{mark}{self._texts.index(m[0])}{mark}", value)
        if isinstance(value, dict):
            return {self._hidden(k, mark): self._hidden(v, mark) for k, v in value.items()}
        if isinstance(value, list):
            return [self._hidden(each, mark) for each in value]
        return value

    def _appear_when_folded(self, written: str) -> bool:
        folded = str(self._tokenizer.normalizer.normalize_str(written))
        if self._finder.find_matches_as_indexes(folded.encode()):
            raise _no_text()
        return False

    def _twin_name(self, number: int) -> str:
        return f"{self._name}{number}{_GUARD}"

    def _guarded(self) -> Tokenizer:
        with self._lock:
            if self._twin is None:
                self._twin = self._made_twin()
            return self._twin

    def _made_twin(self) -> Tokenizer:
        told = json.loads(self._tokenizer.to_str())
        names = {text: self._twin_name(number) for text, number in self._ids.items()}
        for each in told["added_tokens"]:
            if each["content"] in names:
                each["content"], each["normalized"] = names[each["content"]], False
        model = told["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(k, k): v for k, v in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[names.get(k, k), score] for k, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        try:
            twin = Tokenizer.from_str(json.dumps(told))
        except Exception:  # tokenizers raises plain Exception
            raise _no_text() from None
        if any(twin.token_to_id(names[text]) != number for text, number in self._ids.items()):
            raise _no_text()
        return twin


def _in_json(text: str) -> bytes:
    return orjson.dumps(text)[1:-1]


def _no_text() -> BadRequest:
    return BadRequest(
        "A text contains a control token of this model, and its tokenizer cannot encode those "
        "characters as plain text.",
        next_step="Remove such markers, for example <|im_end|>.",
        param="messages",
        code="control_token_in_text",
    )
