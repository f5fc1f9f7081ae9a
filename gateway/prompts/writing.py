"""Renders a request to the text that the model reads, and encodes it."""

import json
from typing import Any

from msgspec import Struct

from core.errors import BadRequest
from gateway.ask import Ask
from gateway.prompts.token_heads import LEAST_TEXT, Pieces
from gateway.prompts.tokenizing import TextCodec

_OURS = (
    "cache_control",
    "volatile",
    "rank",
)  # marks for the gateway, which the template must not see


class Written(Struct, frozen=True):
    """`mark` is set when control tokens in the client's text were hidden."""

    codec: TextCodec
    text: str
    bare: bool = False  # a raw prompt: its control tokens are intended by the client
    mark: str | None = None

    def ids(self) -> list[int]:
        if self.mark is not None:
            return self.codec.control.encode(self.text, self.mark)
        return self.codec.encode(self.text, special=self.bare)

    def pieces(self, tenant_id: str) -> Pieces | None:
        """None when no part of the text is cached between requests."""
        if self.bare or self.mark is not None or len(self.text) < LEAST_TEXT:
            return None
        return self.codec.heads.pieces(tenant_id, self.text)


def written(ask: Ask, codec: TextCodec) -> Written:
    """Raises BadRequest when the model has no chat template or the template rejects the messages."""
    if ask.messages is None:
        (prompt,) = ask.prompts
        assert isinstance(prompt, str)
        return Written(codec, prompt, bare=True)
    return written_chat(ask.model, ask.messages, ask.tools, codec)


def written_chat(
    model: str,
    given: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    codec: TextCodec,
) -> Written:
    template = codec.template
    if template is None:
        raise BadRequest(
            f"The model {model} has no chat template.",
            next_step="Use /v1/completions, or a model with a chat template.",
            param="messages",
        )
    messages = [_plain(message) for message in given]
    if tools and not template.takes_tools:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        messages.insert(0, {"role": "system", "content": f"Tools:\n{listed}"})
        tools = None
    if not codec.control.occur_in(messages, tools):
        return Written(codec, template.render(messages, tools=tools))
    hidden = codec.control.disarm(messages, tools)
    return Written(codec, template.render(hidden.messages, tools=hidden.tools), mark=hidden.mark)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    made = {k: v for k, v in message.items() if k not in _OURS}
    content = made.get("content")
    if isinstance(content, list):
        made["content"] = "".join(part["text"] for part in content)
    if made["role"] == "developer":
        made["role"] = "system"
    return made
