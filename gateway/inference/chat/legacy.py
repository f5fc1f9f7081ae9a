"""`functions` and `function_call`, which OpenAI replaced by tools: read as tools, written as asked."""

from typing import TYPE_CHECKING, Any

from core.errors import BadRequest

if TYPE_CHECKING:
    from gateway.inference.chat.request import ChatBody, Tool


def choice_and_tools(body: "ChatBody") -> tuple[Any, "list[Tool] | None"]:
    """tool_choice and tools, or what the legacy fields say in their words."""
    if not body.functions:
        if body.function_call not in (None, "none", "auto"):
            raise _wrong("function_call", "omitted without functions")
        return body.tool_choice, body.tools
    if body.tools or body.tool_choice is not None:
        raise _wrong("functions", "omitted when tools are set")
    from gateway.inference.chat.request import Tool

    tools = [Tool(type="function", function=each) for each in body.functions]
    choice = body.function_call
    if isinstance(choice, dict) and isinstance(choice.get("name"), str) and len(choice) == 1:
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise _wrong("function_call", 'none, auto or {"name": …}')
    return choice, tools


def with_tool_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with function calls and their results written as those of tools."""
    for each in messages:
        if "function_call" in each or each["role"] == "function":
            break
    else:
        return messages
    converted, last = [], "call_0"
    for index, message in enumerate(messages):
        message = dict(message)
        if (call := message.pop("function_call", None)) is not None:
            last = f"call_{index}"
            message["tool_calls"] = [{"id": last, "type": "function", "function": call}]
        elif message["role"] == "function":
            message |= {"role": "tool", "tool_call_id": last}
        converted.append(message)
    return converted


def _wrong(name: str, form: str) -> BadRequest:
    return BadRequest(
        f"{name} must be {form}.", next_step=f"Correct {name}.", param=name, code="invalid_value"
    )
