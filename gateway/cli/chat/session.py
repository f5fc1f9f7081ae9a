"""One conversation: its history, its commands, and its usage so far."""

import re
from collections.abc import Callable

from core.errors import TollhouseError
from gateway.cli.chat.client import ChatClient, Message, Usage

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
