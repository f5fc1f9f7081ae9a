"""One conversation: its history, its commands, and its usage so far."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from core.clock import SystemClock
from core.errors import BadRequest, SettingError, TollhouseError, Unavailable
from gateway.engines.server_events import DONE, EventReader, data_of, loads

_TIMEOUT_S = 600.0
_MAX_ERROR_BYTES = 65_536
_LONGEST_EVENT = 8 << 20  # bytes
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Usage:
    prompt: int = 0
    cached: int = 0
    output: int = 0
    answers: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt + other.prompt,
            self.cached + other.cached,
            self.output + other.output,
            self.answers + other.answers,
        )


class ChatClient:
    """One gateway and one key. Errors are TollhouseErrors with the server's own message."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingError(
                f"{url!r} is not the address of a gateway.",
                next_step="Give one such as http://127.0.0.1:8000.",
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        self._secure = parts.scheme == "https"
        self._netloc = parts.netloc
        self._key = key

    def models(self) -> list[str]:
        with self._call("GET", "/v1/models") as answer:
            return [str(each["id"]) for each in json.load(answer)["data"]]

    def charges_today(self) -> tuple[Decimal, str] | None:
        """(amount, currency) of the organisation's rated charges since midnight UTC; None where the key
        may not read costs."""
        now = SystemClock().now()
        start = int(datetime(now.year, now.month, now.day, tzinfo=UTC).timestamp())
        try:
            with self._call("GET", f"/v1/organization/costs?start_time={start}") as answer:
                pages = json.load(answer)["data"]
        except TollhouseError:
            return None
        amounts = [result["amount"] for page in pages for result in page["results"]]
        total = sum((Decimal(str(each["value"])) for each in amounts), Decimal(0))
        return total, str(amounts[0]["currency"]).upper() if amounts else "USD"

    def answer(self, model: str, messages: list[Message]) -> Iterator[str | Usage]:
        """Yields the text as it arrives, then the usage. Closing the iterator cancels the request."""
        body = {
            "model": model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "truncation": "auto",
        }
        with self._call("POST", "/v1/chat/completions", body) as stream:
            for event in _events(stream):
                if "error" in event:
                    raise Unavailable(str(event["error"]["message"]))
                if event.get("usage"):
                    yield _usage(event["usage"])
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    @contextmanager
    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        connect = HTTPSConnection if self._secure else HTTPConnection
        connection = connect(self._netloc, timeout=_TIMEOUT_S)
        headers = {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        try:
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refused(response)
            yield response
        except (ValueError, LookupError, TypeError) as error:
            raise Unavailable(
                f"The server at {self.url} does not answer as a Tollhouse gateway does: {error!r}.",
                next_step="Give the gateway's address with --url.",
            ) from None
        except (OSError, HTTPException) as error:
            raise Unavailable(
                f"The gateway at {self.url} does not answer: {error or type(error).__name__}.",
                next_step="Start it with `tollhouse serve`, or give its address with --url.",
            ) from None
        finally:
            connection.close()


def _events(stream: HTTPResponse) -> Iterator[dict[str, Any]]:
    reader = EventReader(_LONGEST_EVENT)
    while piece := stream.read1():
        for data in map(data_of, reader.feed(piece)):
            if data and data != DONE:
                yield loads(data)


def _refused(response: HTTPResponse) -> TollhouseError:
    raw = response.read(_MAX_ERROR_BYTES)
    try:
        message = str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the gateway answered {response.status} {response.reason}"
    kind = BadRequest if 400 <= response.status < 500 else Unavailable
    return kind(message)


def _usage(usage: dict[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"], 1)


HELP = "/model [NAME]  /cost  /new  /quit  /help; Ctrl-C ends an answer, Ctrl-D quits"
# Control characters, which a terminal would interpret; line feeds and tabs are kept.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Write = Callable[[str], None]


class ChatSession:
    """`write` shows the text of answers; `remark` shows a line of the program's own."""

    def __init__(self, client: ChatClient, model: str, write: Write, remark: Write) -> None:
        self.model = model
        self.used = Usage()
        self.messages: list[Message] = []
        self.failed = False
        self._client = client
        self._write = write
        self._remark = remark

    def handle(self, line: str) -> bool:
        """Answer a line or run a command. Returns False to quit."""
        text = line.strip()
        if text in ("/quit", "/exit"):
            return False
        try:
            if text.startswith("/"):
                self._command(*text.split(maxsplit=1))
            elif text:
                self._answer(text)
        except TollhouseError as error:
            self.failed = True
            self._remark(f"tollhouse: {error}")
        return True

    def _command(self, name: str, value: str = "") -> None:
        if name == "/new":
            self.messages = []
            self._remark("A new conversation.")
        elif name == "/cost":
            self._cost()
        elif name == "/model":
            self._choose(value.strip())
        elif name == "/help":
            self._remark(HELP)
        else:
            self.failed = True
            self._remark(f"{name} is not a command: {HELP}")

    def _choose(self, name: str) -> None:
        known = self._client.models()
        if name and name not in known:
            self.failed = True
            self._remark(f"There is no model {name!r}; available: {', '.join(known)}.")
            return
        self.model = name or self.model
        self._remark(f"model: {self.model}" + ("" if name else f" (of {', '.join(known)})"))

    def _cost(self) -> None:
        used = self.used
        self._remark(
            f"{used.answers} answers: {used.prompt} prompt tokens ({used.cached} cached), "
            f"{used.output} output tokens."
        )
        charged = self._client.charges_today()
        if charged is not None:
            total, currency = charged
            self._remark(f"Charges of the organisation today, rated so far: {total:f} {currency}.")

    def _answer(self, text: str) -> None:
        """Send `text` and show the answer. A failed request leaves the history unchanged; an interrupted
        answer is kept as far as it arrived."""
        messages: list[Message] = [*self.messages, {"role": "user", "content": text}]
        parts: list[str] = []
        stream = self._client.answer(self.model, messages)
        try:
            for part in stream:
                if isinstance(part, Usage):
                    self.used += part
                    continue
                parts.append(part)
                self._write(_CONTROL.sub("", part))
        except KeyboardInterrupt:
            self._write(" […]")
        finally:
            stream.close()  # type: ignore[attr-defined]  # a generator
            if parts:
                self._write("\n")
        self.messages = [*messages, {"role": "assistant", "content": "".join(parts)}]
