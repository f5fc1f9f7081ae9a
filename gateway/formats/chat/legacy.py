"""`functions` and `function_call`, which OpenAI replaced by tools: read as tools, written as asked."""

from typing import Any


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
