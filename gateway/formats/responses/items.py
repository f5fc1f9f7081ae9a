"""Items of /v1/responses and their form as messages of a chat."""

from typing import Any, Literal

from core.errors import UnsupportedParameter
from gateway.edge.decoding import Request
from gateway.prompts.tool_lists import flat_name
from gateway.request import media_parts
from gateway.request.thoughts import FIELD, OPENAI, encrypted, unpack


class Part(Request):
    type: str
    text: str | None = None
    refusal: str | None = None
    annotations: Any = None
    logprobs: Any = None
    image_url: Any = None
    file_id: Any = None
    detail: Any = None
    file_data: Any = None
    filename: Any = None
    file_url: Any = None


class Item(Request):
    """A message, a function call or its output. Other item types are refused."""

    type: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    namespace: str | None = None
    output: Any = None
    summary: Any = None  # of a reasoning item
    encrypted_content: str | None = None


class Conversation:
    """Messages of a chat, from items in their order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.media: dict[str, str] = {}  # kinds of parts that are not text -> where the first is
        self.tool_reasoning: dict[str, str] = {}  # see `InferenceRequest`
        self._thought = ""  # before the next call
        self._details: list[dict[str, Any]] = []  # of the same, as its provider wants it back
        self._images: list[dict[str, Any]] = []  # of the last calls' outputs

    def add(self, index: int, item: Item) -> None:
        """Consecutive function calls join one assistant message. Reasoning of earlier turns is not
        shown to the model again; that of a tool loop is `tool_reasoning`."""
        if item.type == "reasoning":
            parts = item.content if isinstance(item.content, list) else []
            self._thought += "".join([part.text or "" for part in parts])
            self._details += _details_of(item)
            return
        if item.type == "function_call_output" and item.call_id:
            content = self._output(index, item.output, item.call_id)
            message = {"role": "tool", "tool_call_id": item.call_id, "content": content}
            self.messages.append(message)
            return
        self.end_outputs()
        if item.type == "function_call" and item.name and item.call_id:
            self._call(item, item.name)
        else:
            self.messages.append(self._message(index, item))
            if item.role == "user":
                self._thought, self.tool_reasoning, self._details = "", {}, []
            elif item.role == "assistant":
                self._take_details(self.messages[-1])

    def end_outputs(self) -> None:
        """Puts their images into a message of the user: in a chat, tools answer in text."""
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []

    def _call(self, item: Item, own_name: str) -> None:
        name = flat_name(item.namespace, own_name) if item.namespace else own_name
        function = {"name": name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None})
        self._take_details(self.messages[-1])
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append(call)
        if self._thought:
            self.tool_reasoning[calls[0]["id"]] = self._thought
            self._thought = ""

    def _take_details(self, message: dict[str, Any]) -> None:
        """Gives the reasoning before a message or call to its turn of the chat."""
        if self._details:
            content = message.get("content")
            parts = len(content) if isinstance(content, list) else int(bool(content))
            place = parts + len(message.get("tool_calls") or ())
            if message["role"] == "assistant" and not message.get("tool_calls"):
                place = 0
            listed = message.setdefault(FIELD, [])
            listed += [{**each, "index": place} for each in self._details]
            self._details = []

    def _output(self, index: int, output: Any, call_id: str) -> str:
        if isinstance(output, str):
            return output
        if not isinstance(output, list):
            raise _not_a_message(index)
        texts: list[str] = []
        for place, part in enumerate(output):
            if isinstance(part, dict) and part.get("type") == "input_image":
                where = f"input[{index}].output[{place}]"
                image = self._image(where, part.get("image_url"), part.get("detail"))
                self._images.append({**image, "of_call": call_id})
            elif isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                raise _not_a_message(index)
        return "\n".join(texts)

    def _message(self, index: int, item: Item) -> dict[str, Any]:
        if item.type not in (None, "message") or item.role is None or item.content is None:
            raise _not_a_message(index)
        if isinstance(item.content, str):
            return {"role": item.role, "content": item.content}
        where = f"input[{index}].content"
        parts = [self._part(f"{where}[{place}]", part) for place, part in enumerate(item.content)]
        return {"role": item.role, "content": parts}

    def _part(self, where: str, part: Part) -> dict[str, Any]:
        if part.type == "input_image" and part.file_id is None:
            return self._image(where, part.image_url, part.detail)
        if part.type == "input_file" and part.file_id is None:
            return self._file(where, part)
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("input_text", "output_text", "text", "refusal") or text is None:
            raise UnsupportedParameter(
                f"{where} is not text; this model supports text only.",
                next_step="Send parts of type input_text.",
                param=where,
            )
        return {"type": "text", "text": text}

    def _file(self, where: str, part: Part) -> dict[str, Any]:
        self.media.setdefault("documents", where)
        given = {"file_data": part.file_data, "filename": part.filename, "url": part.file_url}
        file = {name: value for name, value in given.items() if value is not None}
        return media_parts.checked(where, "file", file)

    def _image(self, where: str, url: Any, detail: Any) -> dict[str, Any]:
        self.media.setdefault("images", where)
        image = {"url": url} | ({"detail": detail} if detail else {})
        return media_parts.checked(where, "image_url", image)


def _details_of(item: Item) -> list[dict[str, Any]]:
    """The reasoning of an item that has some encrypted: of OpenAI's own, or of the provider whose
    details we wrote into it."""
    if not item.encrypted_content:
        return []
    written = unpack(item.encrypted_content)
    if written is not None:
        return written
    detail = encrypted(item.encrypted_content, OPENAI)
    if item.id:
        detail["id"] = item.id
    if isinstance(item.summary, list) and item.summary:
        detail["parts"] = item.summary
    return [detail]


def _not_a_message(index: int) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"input[{index}] is not a message, a function call or a text output of one.",
        next_step="Send items with a role and content, or function_call and function_call_output.",
        param=f"input[{index}]",
    )
