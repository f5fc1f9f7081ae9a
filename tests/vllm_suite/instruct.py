"""A stand-in for an instruct model: a server with vLLM's API whose model always does as it is told.

It thinks, calls the tool that it is given, fills in a JSON schema, and ends where its tokens (words)
are used up. Tests that need a model of billions of parameters to do so ask, before it, whether the
gateway passes all of that on.
"""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CONTEXT = 18_192
_THOUGHT = "The user asks something , so an answer has to be found first ."
_ANSWER = " ".join(["Hello !", *["This is a sentence of the stand-in model ."] * 8])


class InstructServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def entry(self, model: str) -> dict[str, Any]:
        """Of TOLLHOUSE_UPSTREAMS."""
        return {
            "url": f"http://127.0.0.1:{self.server_address[1]}",
            "name": "stand-in",
            "model": model,
            "engine": "vllm",
            "context_length": _CONTEXT,
            "capabilities": ["tools", "json", "grammar"],
            "price": {"input": "0.10", "output": "0.40"},
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        listed = {"object": "list", "data": [{"id": "stand-in", "max_model_len": _CONTEXT}]}
        self._send("application/json", json.dumps(listed).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = _Answer(body)
        if body.get("stream"):
            lines = [f"data: {json.dumps(each)}\n\n" for each in answer.events()]
            self._send("text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())
        else:
            self._send("application/json", json.dumps(answer.whole()).encode())

    def log_message(self, *_words: object) -> None:
        return

    def _send(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Answer:
    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body
        self._left = int(body.get("max_tokens") or body.get("max_completion_tokens") or 10_000)
        variables = body.get("chat_template_kwargs") or {}
        thinks = variables.get("enable_thinking", True) and body.get("reasoning_effort") != "none"
        self.thought = self._take(_THOUGHT) if thinks else []
        name = _tool_of(body)
        self.call: dict[str, Any] | None = None
        self.words: list[str] = []
        if name is not None:
            given = next(t["function"] for t in body["tools"] if t["function"]["name"] == name)
            arguments = json.dumps(_instance(given.get("parameters") or {}, len(body["messages"])))
            if len(self._take(arguments)) == len(arguments.split()):
                function = {"name": name, "arguments": arguments}
                self.call = {"id": "call_1", "type": "function", "function": function}
        else:
            schema = _schema_of(body)
            text = json.dumps(_instance(schema, 0)) if schema is not None else _text_of(body)
            self.words = self._take(text)
        whole = self.call is not None or (name is None and self._left > 0)
        self.reason = "length" if not whole else "tool_calls" if self.call else "stop"

    def _take(self, text: str) -> list[str]:
        words = text.split(" ")
        taken = words[: self._left]
        self._left -= len(taken)
        return taken

    def whole(self) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": " ".join(self.words) or None,
            "reasoning": " ".join(self.thought) or None,
            "tool_calls": [self.call] if self.call else [],
        }
        choice = {"index": 0, "message": message, "finish_reason": self.reason}
        choice["logprobs"] = self._logprobs(self._tokens())
        return {"choices": [choice], "usage": self._usage()}

    def events(self) -> Iterator[dict[str, Any]]:
        for number, word in enumerate(self.thought):
            yield self._event({"reasoning": word if not number else f" {word}"})
        for token in self._tokens():
            yield self._event({"content": token}, logprobs=self._logprobs([token]))
        if self.call is not None:
            yield self._event({"tool_calls": [{"index": 0, **self.call}]})
        yield self._event({}, self.reason)
        yield {"choices": [], "usage": self._usage()}

    def _tokens(self) -> list[str]:
        return [word if not number else f" {word}" for number, word in enumerate(self.words)]

    def _event(
        self, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
        return {"choices": [choice]}

    def _logprobs(self, tokens: list[str]) -> dict[str, Any] | None:
        if not self._body.get("logprobs"):
            return None
        count = self._body.get("top_logprobs") or 0
        top = [{"token": f" {n}", "logprob": -0.1 - n, "bytes": None} for n in range(count)]
        listed = [{"token": t, "logprob": -0.1, "bytes": None, "top_logprobs": top} for t in tokens]
        return {"content": listed}

    def _usage(self) -> dict[str, Any]:
        called = len(self.call["function"]["arguments"].split()) if self.call else 0
        made = len(self.thought) + len(self.words) + called
        prompt = max(1, len(json.dumps(self._body["messages"])) // 4)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "completion_tokens_details": {"reasoning_tokens": len(self.thought)},
        }


def _tool_of(body: dict[str, Any]) -> str | None:
    """The name of the tool that is to be called: none once it has answered."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        return str(choice["function"]["name"])
    if not body.get("tools") or choice == "none" or body["messages"][-1]["role"] == "tool":
        return None
    return str(body["tools"][0]["function"]["name"])


def _text_of(body: dict[str, Any]) -> str:
    """Longer where the last message asks for it."""
    asked = re.search(r"exceed (\d+) words", json.dumps(body["messages"][-1]))
    return _ANSWER + " more" * (int(asked[1]) if asked else 0)


def _schema_of(body: dict[str, Any]) -> dict[str, Any] | None:
    form = body.get("response_format") or {}
    if form.get("type") == "json_schema":
        return dict(form["json_schema"].get("schema") or {})
    return {"type": "object"} if form.get("type") == "json_object" else None


def _instance(schema: dict[str, Any], number: int) -> Any:
    """A value that the schema allows, which differs by `number`."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        named = schema.get("properties") or {}
        return {name: _instance(each, number) for name, each in named.items()}
    if kind == "array":
        count = max(1, int(schema.get("minItems", 1)))
        return [_instance(schema.get("items") or {"type": "string"}, number)] * count
    plain = {"string": f"word{number}", "integer": number, "number": number / 2, "boolean": True}
    return plain.get(kind)
