"""Servers that look like vLLM to a picker: their answers name them and echo what they were sent."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ModelServer:
    """What its pages say may be changed while it runs."""

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    adapters: str = ""
    models: tuple[str, ...] = ("base",)
    answers: bool = True
    closes: bool = False  # its connections, after each answer
    address: str = ""
    filler: str = ""  # before its metrics
    looks: int = 0  # how often its metrics were read
    listed: int = 0  # how often its models were
    bodies: list[bytes] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None

    def metrics(self) -> str:
        return (
            f"{self.filler}"
            f'vllm:num_requests_running{{model_name="base"}} {self.running}\n'
            f'vllm:num_requests_waiting{{model_name="base"}} {self.waiting}\n'
            f"vllm:kv_cache_usage_perc {self.kv_used}\n"
            'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1\n'
            'vllm:lora_requests_info{max_lora="4",running_lora_adapters="old"} 10\n'
            f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{self.adapters}"}} 20\n'
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def own(self) -> ModelServer:
        server: Any = self.server
        return server.own

    def do_GET(self) -> None:
        if not self.own.answers:
            self.send_error(503)
        elif self.path == "/metrics":
            self.own.looks += 1
            self._send(self.own.metrics().encode())
        elif self.path == "/v1/models":
            self.own.listed += 1
            self._send(json.dumps({"data": [{"id": each} for each in self.own.models]}).encode())
        else:
            self._send(json.dumps({"server": self.own.address}).encode())

    def do_POST(self) -> None:
        body = self._body()
        self.own.bodies.append(body)
        answer = {"server": self.own.address, "bytes": len(body)}
        answer["digest"] = hashlib.sha256(body).hexdigest()
        if b'"stream": true' in body or b'"stream":true' in body:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for each in (*(f"data: {n}\n\n" for n in range(50)), f"data: {json.dumps(answer)}\n\n"):
                self.wfile.write(f"{len(each):x}\r\n{each}\r\n".encode())
            self.wfile.write(b"0\r\n\r\n")
        else:
            self._send(json.dumps(answer).encode())

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline().strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if self.own.closes:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def running_servers(count: int) -> Iterator[list[ModelServer]]:
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            server: Any = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Handler))
            server.daemon_threads = True
            server.own = ModelServer(address=f"127.0.0.1:{server.server_port}")
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

            def _stop(each: Any = server) -> None:
                each.shutdown()
                each.server_close()

            server.own.stop = _stop
            stack.callback(server.shutdown)
            made.append(server.own)
        yield made
