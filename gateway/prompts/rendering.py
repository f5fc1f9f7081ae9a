"""Renders a request to the text that the model reads, and encodes it."""

from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from core.errors import BadRequest
from gateway.catalog.codec.prefix_tokens import MIN_TEXT, Pieces
from gateway.catalog.codec.templates import ChatTemplate
from gateway.catalog.codec.tokenizing import TextCodec
from gateway.prompts.tool_lists import GATEWAY_MARKS, ToolList, json_text
from gateway.request.inference import InferenceRequest
from gateway.request.plain_messages import PlainMessages

NO_CHAT_TEMPLATE = "no_chat_template"
_PLAIN_FIELDS = 2  # of a message that has a role and content alone


class RenderedPrompt(Struct, frozen=True):
    """`mark` is set when control tokens in the client's text were hidden."""

    codec: TextCodec
    text: str
    raw: bool = False  # a raw prompt: its control tokens are intended by the client
    mark: str | None = None

    def ids(self, at_most: int | None = None) -> list[int]:
        """Raises TooManyTokens for a long text that has more than `at_most`."""
        if self.mark is not None:
            return self.codec.control.encode(self.text, self.mark, at_most)
        return self.codec.encode(self.text, special=self.raw, at_most=at_most)

    def pieces(self, tenant_id: str) -> Pieces | None:
        """None when no part of the text is cached between requests."""
        if self.raw or self.mark is not None or len(self.text) < MIN_TEXT:
            return None
        return self.codec.prefix_tokens.pieces(tenant_id, self.text)


def render_prompt(request: InferenceRequest, codec: TextCodec) -> RenderedPrompt:
    """Raises BadRequest when the model has no chat template or the template rejects the messages."""
    if request.messages is None:
        (prompt,) = request.prompts
        assert isinstance(prompt, str)
        return RenderedPrompt(codec, prompt, raw=True)
    variables = request.chat_template_kwargs
    if codec.template is not None and request.reasoning_effort is not None:
        variables = codec.template.effort_variables(request.reasoning_effort) | variables
    rendered = render_chat(
        request.model,
        request.messages,
        request.tools,
        codec,
        variables,
        begins_answer=not request.continue_final_message,
    )
    return (
        _continued(rendered, request.messages[-1]) if request.continue_final_message else rendered
    )


def _continued(rendered: RenderedPrompt, last: dict[str, Any]) -> RenderedPrompt:
    """Cut after the text of the last message, so that the model continues it."""
    text = str(_template_message(last, rendered.codec.template)["content"] or "").strip()
    if rendered.mark is not None:
        text = rendered.codec.control.escape_value(text, rendered.mark)
    place = rendered.text.rfind(text) if text else -1
    if place < 0:
        raise BadRequest(
            "The model's chat template does not write the last message as it is, so it cannot be "
            "continued.",
            next_step="End the conversation with a user message.",
            param="messages",
        )
    return replace(rendered, text=rendered.text[: place + len(text)])


def render_chat(
    model: str,
    given: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    codec: TextCodec,
    variables: dict[str, Any] | None = None,
    *,
    begins_answer: bool = True,
) -> RenderedPrompt:
    """`variables` are the client's chat_template_kwargs. `begins_answer`: the prompt ends where the
    model's own turn begins."""
    template = codec.template
    if template is None:
        raise BadRequest(
            f"The model {model} has no chat template.",
            next_step="Use /v1/completions, or a model with a chat template.",
            param="messages",
            code=NO_CHAT_TEMPLATE,
        )
    variables = variables or {}
    template.check_variables(variables)
    messages = (
        given
        if type(given) is PlainMessages and "developer" not in given.roles
        else [_template_message(message, template) for message in given]
    )
    if tools and not template.supports_tools:
        listed = "\n".join(tools.texts if type(tools) is ToolList else map(json_text, tools))
        messages = [{"role": "system", "content": f"Tools:\n{listed}"}, *messages]
        tools = None
    if not codec.control.occur_in(messages, tools, variables):
        text = template.render(
            messages, tools=tools, add_generation_prompt=begins_answer, **variables
        )
        return RenderedPrompt(codec, text)
    escaped = codec.control.escape(messages, tools, variables)
    text = template.render(
        escaped.messages,
        tools=escaped.tools,
        add_generation_prompt=begins_answer,
        **escaped.variables,
    )
    return RenderedPrompt(codec, text, mark=escaped.mark)


def _template_message(message: dict[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    content = message.get("content")
    if len(message) == _PLAIN_FIELDS and isinstance(content, str):
        if message["role"] != "developer":
            return message  # role and content: the template reads it as it is
        return {"role": "system", "content": content}
    result = {k: v for k, v in message.items() if k not in GATEWAY_MARKS}
    if isinstance(content, list):
        result["content"] = "".join(part.get("text", "") for part in content)
    if result["role"] == "developer":
        result["role"] = "system"
    if template is not None and (result.get("content") is None or result.get("tool_calls")):
        return template.call_turns.message(result)
    return result
