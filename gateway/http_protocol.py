"""uvicorn's HTTP over httptools, with a bound on headers, which it lacks."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 65_536  # bytes of one request's head
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: 120\r\n\r\n"
    b'{"error":{"message":"The headers are larger than 64 KiB.",'
    b'"type":"invalid_request_error","param":null,"code":"headers"}}'
)


class BoundedHttp(HttpToolsProtocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = False
        self._head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if sum(len(name) + len(value) for name, value in self.headers) > MAX_HEADERS:
            self._refuse()
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._in_head and not self._refused:
            # The head is not whole yet: what came so far is kept in memory.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS:
                self._refuse()

    _refused = False

    def _refuse(self) -> None:
        self._refused = True
        self.transport.write(_TOO_LARGE)
        self.transport.close()
