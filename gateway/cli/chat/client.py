"""A client of the REST API for the terminal chat, on the standard library's HTTP client."""

import json
from collections.abc import Iterator
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
