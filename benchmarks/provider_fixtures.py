"""Recorded answers of providers: the share that the ports read, render and price right.

    python -m benchmarks.provider_fixtures DIR [--list]

DIR holds the recordings (`agentgateway`, `vercel-ai`, `pydantic-ai`), which are no part of this
repository. An oracle of this file's own reads the text, the tool calls and the counts out of the JSON,
by a hand-kept table of what each provider's counts include; the ports' readers know nothing of it.
A recording counts as right when text, calls, counts and money agree and three surfaces render it.
Recordings of other APIs (embeddings, images, transcripts, conversations in real time) are left out,
and how many is said.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from benchmarks import report
from gateway.answers.choices import ChoiceOutput
from gateway.answers.reasoning import OutputReader
from gateway.answers.surface import ResponseInfo
from gateway.answers.tool_calls import ToolReader
from gateway.engines.ports.port import ReportedError
from gateway.engines.ports.recordings import Recorded, events_of, read_recording
from gateway.formats.registry import inference_surfaces
from gateway.request.inference import InferenceRequest, Usage

AT_LEAST, AIM = 0.95, 0.995
PARTS = ("input", "cache_read", "cache_write", "cache_write_long", "output")
PRICES = (3_000_000, 300_000, 3_750_000, 6_000_000, 15_000_000)  # picounits a token, each another
_FOLDERS = {
    "amazon-bedrock": "bedrock",
    "google": "gemini",
    "openai-compatible": "openai",
    "bedrock-nova": "bedrock",
    "completions": "openai",
    "responses": "openai",
    "vertex-gemini": "gemini",
}
_ENDS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
_HOSTS = {
    "api.anthropic.com": "anthropic",
    "generativelanguage.googleapis.com": "gemini",
    "api.openai.com": "openai",
    "api.mistral.ai": "mistral",
    "api.cohere.com": "cohere",
    "api.groq.com": "groq",
    "api.deepseek.com": "deepseek",
    "openrouter.ai": "openrouter",
    "api.x.ai": "xai",
    "api.together.xyz": "together",
}


@dataclass(frozen=True)
class Recording:
    name: str
    port: str
    data: bytes


@dataclass
class Said:
    """What the oracle reads."""

    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


class NotOurs(Exception):
    """The recording is of another API."""


def recordings(folder: Path) -> Iterator[Recording]:
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if not path.is_file() or path.suffix == ".snap" or "requests" in parts:
            continue
        if path.suffix in (".yaml", ".yml"):
            yield from _of_cassette(path)
        elif path.suffix in (".json", ".txt", ".bin", ".sse") or not path.suffix:
            name = path.parent.name
            port = _FOLDERS.get(name, name)
            for number, data in enumerate(_answers(path.read_bytes())):
                yield Recording(f"{path.relative_to(folder)}#{number}", port, data)


def _answers(data: bytes) -> list[bytes]:
    """Each answer of a file that holds several, one after another."""
    try:
        events = events_of(data) or []
    except Exception:  # it is for the oracle to say
        return [data]
    kinds = [each.get("type") if isinstance(each, dict) else None for each in events]
    ends = [at + 1 for at, kind in enumerate(kinds) if kind in _ENDS]
    if len(ends) < 2:
        return [data]
    starts = [0, *ends[:-1]]
    return [
        "\n".join(map(json.dumps, events[start:end])).encode()
        for start, end in zip(starts, ends, strict=True)
    ]


def _of_cassette(path: Path) -> Iterator[Recording]:
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    held = yaml.load(path.read_text(), Loader=loader)
    for number, each in enumerate(held.get("interactions") or ()):
        request, response = each.get("request") or {}, each.get("response") or {}
        port = _port_of(str(request.get("uri")))
        if port is None:
            continue
        body = response.get("parsed_body")
        data = json.dumps(body).encode() if body is not None else _bytes_of(response.get("body"))
        status = response.get("status") or {}
        if int(status.get("code") or 200) >= 400:
            continue  # an error, which has no usage
        yield Recording(f"{path.parent.name}/{path.name}#{number}", port, data)


def _bytes_of(body: Any) -> bytes:
    held = body.get("string") if isinstance(body, dict) else body
    if isinstance(held, dict):
        return json.dumps(held).encode()
    return held if isinstance(held, bytes) else str(held or "").encode()


def _port_of(uri: str) -> str | None:
    host = urlsplit(uri).hostname or ""
    if host.startswith("bedrock-runtime"):
        return "bedrock" if "/converse" in uri else None
    if host.endswith("aiplatform.googleapis.com"):
        return "gemini" if "enerateContent" in uri else "anthropic" if "awPredict" in uri else None
    if host.endswith(".openai.azure.com"):
        return "azure"
    return _HOSTS.get(host)


def oracle(port: str, data: bytes) -> Said:
    """Raises NotOurs for what is not an answer to a chat."""
    events = events_of(data)
    if events is None:
        answer = json.loads(data)
        events = [answer] if isinstance(answer, dict) else []
    events = [each for each in events if isinstance(each, dict)]
    if not events:
        raise NotOurs
    first = events[0]
    if str(first.get("type")).startswith("response.") or first.get("object") == "response":
        return _responses(events)
    if any(each.get("type") in ("message", "message_start") for each in events[:2]):
        return _messages(events)
    if port == "gemini":
        return _gemini(events)
    if port == "bedrock":
        return _converse(events)
    if port == "cohere":
        return _cohere(events)
    return _chat(events, port)


def _number(holder: Any, *path: str) -> int:
    for name in path:
        holder = holder.get(name) if isinstance(holder, dict) else None
    return int(holder) if isinstance(holder, int | float) and holder > 0 else 0


def _counts(total: int, read: int, written: int, output: int, reasoning: int = 0) -> dict[str, int]:
    """Of a provider whose input includes what was cached."""
    return {
        "input": total - read - written,
        "cache_read": read,
        "cache_write": written,
        "cache_write_long": 0,
        "output": output,
        "reasoning": reasoning,
    }


def _loaded(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text


def _messages(events: list[dict[str, Any]]) -> Said:
    said, usage, pieces = Said(), dict[str, Any](), dict[int, list[Any]]()
    started = False
    for event in events:
        kind = event.get("type")
        if kind == "message":
            usage |= event.get("usage") or {}
            for index, block in enumerate(event["content"]):
                pieces[index] = [block, ""]
        elif kind == "message_start" and not started:
            started = True
            usage |= event["message"].get("usage") or {}
        elif kind == "content_block_start":
            pieces[event["index"]] = [dict(event["content_block"]), ""]
        elif kind == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "text_delta":
                block = pieces.setdefault(event["index"], [{"type": "text", "text": ""}, ""])[0]
                block["text"] = block.get("text", "") + delta["text"]
            elif delta["type"] == "input_json_delta":
                pieces[event["index"]][1] += delta.get("partial_json") or ""
        elif kind == "message_delta":
            usage |= {k: v for k, v in (event.get("usage") or {}).items() if v is not None}
    for block, text in pieces.values():
        if block["type"] == "text":
            said.text += block["text"]
        elif block["type"] == "tool_use":
            said.calls.append((block["name"], _loaded(text) if text else block.get("input") or {}))
    written = _number(usage, "cache_creation_input_tokens")
    long = _number(usage, "cache_creation", "ephemeral_1h_input_tokens")
    said.counts = {
        "input": _number(usage, "input_tokens"),
        "cache_read": _number(usage, "cache_read_input_tokens"),
        "cache_write": written - long,
        "cache_write_long": long,
        "output": _number(usage, "output_tokens"),
        "reasoning": _number(usage, "output_tokens_details", "thinking_tokens"),
    }
    return said


def _gemini(events: list[dict[str, Any]]) -> Said:
    said, usage = Said(), dict[str, Any]()
    if not any("candidates" in each for each in events):
        raise NotOurs
    for event in events:
        usage |= event.get("usageMetadata") or {}
        for candidate in event.get("candidates") or ():
            for part in (candidate.get("content") or {}).get("parts") or ():
                call = part.get("functionCall")
                if call is not None:
                    if "name" not in call or call.get("willContinue"):
                        raise NotOurs  # arguments in pieces, which no request of ours asks for
                    said.calls.append((call["name"], call.get("args") or {}))
                elif not part.get("thought"):
                    said.text += part.get("text") or ""
    prompt = _number(usage, "promptTokenCount") + _number(usage, "toolUsePromptTokenCount")
    thoughts = _number(usage, "thoughtsTokenCount")
    output = _number(usage, "candidatesTokenCount") + thoughts
    said.counts = _counts(prompt, _number(usage, "cachedContentTokenCount"), 0, output, thoughts)
    return said


def _converse(events: list[dict[str, Any]]) -> Said:
    said, usage, calls = Said(), dict[str, Any](), dict[int, list[Any]]()
    known = ("output", "messageStart", "contentBlockDelta", "contentBlockStart", "metadata")
    if not any(set(known) & each.keys() for each in events):
        raise NotOurs
    for event in events:
        if "output" in event:
            usage = event.get("usage") or {}
            for block in event["output"]["message"]["content"]:
                said.text += block.get("text") or ""
                used = block.get("toolUse")
                if used and used.get("type") != "server_tool_use":
                    said.calls.append((used["name"], used.get("input") or {}))
        if start := (event.get("contentBlockStart") or {}).get("start", {}).get("toolUse"):
            calls[event["contentBlockStart"]["contentBlockIndex"]] = [start["name"], ""]
        delta = (event.get("contentBlockDelta") or {}).get("delta") or {}
        said.text += delta.get("text") or ""
        if used := delta.get("toolUse"):
            calls[event["contentBlockDelta"]["contentBlockIndex"]][1] += used.get("input") or ""
        usage = (event.get("metadata") or {}).get("usage") or usage
    said.calls += [(name, _loaded(text)) for name, text in calls.values()]
    written = _number(usage, "cacheWriteInputTokens")
    details = usage.get("cacheDetails") or ()
    long = sum(_number(each, "inputTokens") for each in details if each.get("ttl") == "1h")
    said.counts = {
        "input": _number(usage, "inputTokens"),
        "cache_read": _number(usage, "cacheReadInputTokens"),
        "cache_write": written - long,
        "cache_write_long": long,
        "output": _number(usage, "outputTokens"),
        "reasoning": 0,
    }
    return said


def _cohere(events: list[dict[str, Any]]) -> Said:
    said, usage, calls = Said(), dict[str, Any](), list[list[str]]()
    if not any(isinstance(each.get("message"), dict) or "delta" in each for each in events):
        raise NotOurs
    for event in events:
        message = event.get("message") or (event.get("delta") or {}).get("message") or {}
        usage = event.get("usage") or (event.get("delta") or {}).get("usage") or usage
        content = message.get("content") or ()
        for part in [content] if isinstance(content, dict) else content:
            said.text += part.get("text") or ""
        given = message.get("tool_calls") or ()
        for call in [given] if isinstance(given, dict) else given:
            function = call.get("function") or {}
            if "name" in function:
                calls.append([function["name"], ""])
            calls[-1][1] += function.get("arguments") or ""
    said.calls = [(name, _loaded(text if text != "null" else "")) for name, text in calls]
    units = "billed_units" if usage.get("billed_units") else "tokens"
    read = _number(usage, "cached_tokens")
    total, output = _number(usage, units, "input_tokens"), _number(usage, units, "output_tokens")
    said.counts = _counts(total, min(read, total), 0, output)
    return said


def _chat(events: list[dict[str, Any]], port: str) -> Said:
    said, usage, calls = Said(), dict[str, Any](), dict[int, list[str]]()
    if not any("choices" in each for each in events):
        raise NotOurs
    for event in events:
        usage = event.get("usage") or (event.get("x_groq") or {}).get("usage") or usage
        for choice in event.get("choices") or ():
            if choice.get("index"):
                continue
            message = choice.get("message") or choice.get("delta") or {}
            said.text += choice.get("text") or ""
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                said.text += part.get("text") or ""
            said.text += content if isinstance(content, str) else ""
            said.text += message.get("refusal") or ""
            for place, call in enumerate(message.get("tool_calls") or ()):
                function = call.get("function") or {}
                number = call.get("index", place)
                known = calls.setdefault(number, ["", ""])
                known[0] = function.get("name") or known[0]
                text = function.get("arguments") or ""
                known[1] += text if isinstance(text, str) else json.dumps(text)
    said.calls = [(name, _loaded(text)) for _, (name, text) in sorted(calls.items())]
    prompt, output = _number(usage, "prompt_tokens"), _number(usage, "completion_tokens")
    reasoning = _number(usage, "completion_tokens_details", "reasoning_tokens")
    reasoning = reasoning or _number(usage, "reasoning_tokens")
    total = _number(usage, "total_tokens")
    if reasoning and (total == prompt + output + reasoning or (not total and port == "xai")):
        output += reasoning
    read = _number(usage, "prompt_tokens_details", "cached_tokens")
    if not read:
        own = {"deepseek": "prompt_cache_hit_tokens", "mistral": "num_cached_tokens"}
        read = _number(usage, own.get(port, "cached_tokens" if port == "together" else "-"))
    written = _number(usage, "prompt_tokens_details", "cache_write_tokens")
    said.counts = _counts(prompt, read, written, output, reasoning)
    return said


def _responses(events: list[dict[str, Any]]) -> Said:
    said, items = Said(), dict[int, dict[str, Any]]()
    response: dict[str, Any] = {}
    for event in events:
        kind = event.get("type")
        if event.get("object") == "response":
            response = event
            items = dict(enumerate(event["output"]))
        elif kind == "response.output_item.done":
            items[event["output_index"]] = event["item"]
        elif kind in ("response.completed", "response.incomplete", "response.failed"):
            response = event["response"]
    for _, item in sorted(items.items()):
        for part in item.get("content") or () if item["type"] == "message" else ():
            said.text += part.get("text") or part.get("refusal") or ""
        if item["type"] == "function_call":
            said.calls.append((item["name"], _loaded(item["arguments"])))
        elif item["type"] == "custom_tool_call":
            said.calls.append((item["name"], _loaded(item["input"])))
    usage = response.get("usage") or {}
    said.counts = _counts(
        _number(usage, "input_tokens"),
        _number(usage, "input_tokens_details", "cached_tokens"),
        _number(usage, "input_tokens_details", "cache_write_tokens"),
        _number(usage, "output_tokens"),
        _number(usage, "output_tokens_details", "reasoning_tokens"),
    )
    return said


def differences(expected: Said, found: Recorded) -> list[str]:
    wrong = []
    text = found.text + found.refusal
    if text != expected.text:
        wrong.append(f"text {text[:60]!r}, not {expected.text[:60]!r}")
    calls = [(each["name"], _loaded(each["arguments"])) for each in found.calls]
    if calls != expected.calls:
        wrong.append(f"calls {calls}, not {expected.calls}"[:300])
    split = found.split
    counts = {name: getattr(split, name) if split else 0 for name in (*PARTS, "reasoning")}
    if counts != expected.counts:
        wrong.append(f"counts {counts}, not {expected.counts}")
    money = sum(counts[name] * price for name, price in zip(PARTS, PRICES, strict=True))
    due = sum(expected.counts[name] * price for name, price in zip(PARTS, PRICES, strict=True))
    if money != due:
        wrong.append(f"{money} picounits, not {due}")
    return wrong + rendering(expected, found)


def rendering(expected: Said, found: Recorded) -> list[str]:
    """What a surface's answer lacks of the text and the calls."""
    wrong = []
    named = [{"type": "function", "function": {"name": name}} for name, _ in expected.calls]
    extra: dict[str, Any] = {
        "named": {},
        "labels": {},
        "namespaces": {},
        "fields": {},
        "metadata": {},
    }
    shown: dict[str, Any] = {"instructions": None, "text": {}, "tools": [], "tool_choice": "auto"}
    for surface in inference_surfaces():
        if surface.route not in ("/v1/chat/completions", "/v1/messages", "/v1/responses"):
            continue
        request = InferenceRequest(
            surface.route,
            "m",
            messages=[],
            tools=named or None,
            extra={**extra, **shown, "parallel_tool_calls": True},
        )
        reader = OutputReader(ToolReader([name for name, _ in expected.calls])) if named else None
        choice = ChoiceOutput(0, None, (), None, reader)
        for said in found.chunks:
            choice.feed(said.chunk("r", 0))
        if not choice.over:
            choice.end("stop")
        info = ResponseInfo("req_1", 0, "m", None, 0)
        answer = surface.answer(info, request, [choice], Usage(0, 0, 0))
        if expected.text and expected.text.strip() not in _texts(answer):
            wrong.append(f"{surface.route} lacks the text")
        if len(choice.calls) != len(expected.calls):
            wrong.append(f"{surface.route} has {len(choice.calls)} calls")
    return wrong


def _texts(value: Any) -> str:
    """The texts of an answer, one after another, without its reasoning."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and value.get("type") in ("thinking", "reasoning"):
        return ""
    if isinstance(value, dict) and value.get("type") == "text":
        return str(value.get("text"))
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "".join([_texts(each) for each in held])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="read recorded answers of providers")
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--list", action="store_true", help="name what is wrong, and what is left out"
    )
    given = parser.parse_args(argv)
    if not given.folder.is_dir():
        print(f"{given.folder} is not a directory of recordings.", file=sys.stderr)
        return 2
    right, seen, out = Counter[str](), Counter[str](), Counter[str]()
    for each in recordings(given.folder):
        try:
            expected = oracle(each.port, each.data)
        except Exception as error:
            out[each.port] += 1
            if given.list:
                print(f"left out {each.name}: {error!r}"[:200], file=sys.stderr)
            continue
        seen[each.port] += 1
        try:
            wrong = differences(expected, read_recording(each.port, each.data))
        except ReportedError as error:
            wrong = [] if not (expected.text or expected.calls) else [repr(error)]
        except Exception as error:
            wrong = [repr(error)]
        right[each.port] += not wrong
        if wrong and given.list:
            print(f"wrong {each.name}: {'; '.join(wrong)}"[:600], file=sys.stderr)
    if not seen:
        print(f"{given.folder} has no recording.", file=sys.stderr)
        return 2
    for port in sorted(seen):
        report.progress(f"{port}: {right[port]} of {seen[port]} right, {out[port]} of other APIs")
    share = right.total() / seen.total()
    report.figure(
        "provider_fixtures",
        share,
        "share",
        higher_is_better=True,
        at_least=AT_LEAST,
        aim=AIM,
        settings={"right": dict(right), "of": dict(seen), "other_apis": out.total()},
    )
    return 0 if share >= AT_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
