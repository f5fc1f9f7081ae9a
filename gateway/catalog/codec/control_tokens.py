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
from gateway.catalog.codec.encoding import TextEncoder
from gateway.catalog.panics import not_encodable
from gateway.request.plain_messages import PlainMessages

# Role markers that some publishers do not flag as special: <|user|>, <｜User｜>. This excludes tags
# such as <think> and <tool_call>, which models read and write as text.
_MARKER = re.compile(r"<[|｜].*[|｜]>")
_GUARD = "\U0010f8ff"
_PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class EscapedChat:
    """A chat with its control tokens replaced by `mark`, the token's index, `mark`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    mark: str
    variables: dict[str, Any]  # of the template, by the client


class ControlTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        control_ids = {
            token.content: number
            for number, token in added.items()
            if token.content and (token.special or _MARKER.fullmatch(token.content))
        }
        self._tokenizer = tokenizer
        self._texts = sorted(control_ids, key=len, reverse=True)
        self._ids = control_ids
        self._finder = BytesAhoCorasick([_in_json(text) for text in self._texts])
        self._plain_finder = BytesAhoCorasick([text.encode() for text in self._texts])
        self._pattern = re.compile("|".join(map(re.escape, self._texts))) if control_ids else None
        # Unguessable, so that no client can write the control tokens of the copy.
        self._name = f"{_GUARD}{secrets.token_hex(16)}:"
        self._normalizes = tokenizer.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in control_ids
        )
        self._safe_encoder: TextEncoder | None = None
        self._lock = threading.Lock()

    def occur_in(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> bool:
        """Whether a string of the client contains a control token. Join the parts of a message's
        content first: a token can be split over two parts."""
        finder = self._finder
        if type(messages) is PlainMessages and not (tools or variables):
            finder, serialized = self._plain_finder, "\0".join(messages.texts).encode()
        else:
            serialized = orjson.dumps((messages, tools, variables))
        if finder.find_matches_as_indexes(serialized):
            return True
        return self._normalizes and self._occur_when_normalized(serialized.decode())

    def escape(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any] | None = None,
    ) -> EscapedChat:
        used = orjson.dumps((messages, tools, variables)).decode()
        mark = next(chr(point) for point in _PRIVATE if chr(point) not in used)
        hidden = [self.escape_value(each, mark) for each in (messages, tools, variables or {})]
        return EscapedChat(hidden[0], hidden[1], mark, hidden[2])

    def encode(self, rendered: str, mark: str, at_most: int | None = None) -> list[int]:
        """The token ids of a rendered `EscapedChat` chat. The first call blocks for seconds with a large
        vocabulary. Raises TooManyTokens where there are more than `at_most`."""
        assert self._pattern is not None
        marked = re.compile(f"{mark}([0-9]+){mark}|{self._pattern.pattern}")
        expected: Counter[int] = Counter()

        def _swap(match: re.Match[str]) -> str:
            if match[1] is not None:
                return self._texts[int(match[1])]
            number = self._ids[match[0]]
            expected[number] += 1
            return self._safe_name(number)

        text = marked.sub(_swap, rendered)
        ids = self._get_safe_encoder().encode(text, at_most=at_most)
        control = set(self._ids.values())
        if Counter(each for each in ids if each in control) != expected:
            raise _not_encodable()
        return ids

    def escape_value(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            assert self._pattern is not None
            return self._pattern.sub(lambda m: f"{mark}{self._texts.index(m[0])}{mark}", value)
        if isinstance(value, dict):
            return {
                self.escape_value(k, mark): self.escape_value(v, mark) for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.escape_value(each, mark) for each in value]
        return value

    def _occur_when_normalized(self, serialized: str) -> bool:
        try:
            normalized_text = str(self._tokenizer.normalizer.normalize_str(serialized))
        except BaseException as error:
            raise not_encodable(error) from None
        if self._finder.find_matches_as_indexes(normalized_text.encode()):
            raise _not_encodable()
        return False

    def _safe_name(self, number: int) -> str:
        return f"{self._name}{number}{_GUARD}"

    def _get_safe_encoder(self) -> TextEncoder:
        with self._lock:
            if self._safe_encoder is None:
                self._safe_encoder = TextEncoder(self._build_safe_tokenizer())
            return self._safe_encoder

    def _build_safe_tokenizer(self) -> Tokenizer:
        config = json.loads(self._tokenizer.to_str())
        names = {text: self._safe_name(number) for text, number in self._ids.items()}
        for each in config["added_tokens"]:
            if each["content"] in names:
                each["content"], each["normalized"] = names[each["content"]], False
        model = config["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(k, k): v for k, v in model["vocab"].items()}
        elif isinstance(model.get("vocab"), list):
            model["vocab"] = [[names.get(k, k), score] for k, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        try:
            safe_tokenizer = Tokenizer.from_str(json.dumps(config))
        except Exception:  # tokenizers raises plain Exception
            raise _not_encodable() from None
        if any(
            safe_tokenizer.token_to_id(names[text]) != number for text, number in self._ids.items()
        ):
            raise _not_encodable()
        return safe_tokenizer


def _in_json(text: str) -> bytes:
    return orjson.dumps(text)[1:-1]


def _not_encodable() -> BadRequest:
    return BadRequest(
        "A text contains a control token of this model, and its tokenizer cannot encode those "
        "characters as plain text.",
        next_step="Remove such markers, for example <|im_end|>.",
        param="messages",
        code="control_token_in_text",
    )
