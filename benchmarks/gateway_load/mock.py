"""The static upstream: nginx answering one chat completion, whole or as a stream of 100 chunks."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

CHUNKS = 100
WHOLE_TEXT = "A toll is paid at the gate, once."
_PASSAGE = (
    "The keeper of the old bridge took one coin from every traveller who came that way and wrote it"
    " down in a long book with a blue cover. In summer the line of carts reached back to the mill,"
    " and the children of the village sold apples to those who waited. In winter hardly anybody came,"
    " so he mended the railings and read what he had written. Nobody ever paid twice, and nobody"
    " passed without paying, because the book was counted against the box each evening before the"
    " lamp was lit and the gate was closed"
)
STREAM_TEXT = "".join(f" {word}" for word in (_PASSAGE.split() * 2)[:CHUNKS])
_CONF = """
{user} worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log; daemon off;
events {{ worker_connections 1024; }}
http {{
  access_log off; keepalive_requests 100000000; client_body_temp_path {home}/body;
  proxy_temp_path {home}/p; fastcgi_temp_path {home}/f; uwsgi_temp_path {home}/u;
  scgi_temp_path {home}/s;
  {servers}
}}
"""
_SERVER = """
server {{ listen 127.0.0.1:{port} backlog=4096; root {home}/void;
  error_page 404 405 =200 /{file};
  location = /v1/models {{ default_type application/json; return 200 '{{"data":[]}}'; }}
  location = /{file} {{ root {home}; types {{ }} default_type "{kind}"; }} }}
"""


@contextlib.contextmanager
def mock(home: Path) -> Iterator[tuple[str, str]]:
    """Addresses of the server of whole answers and of the server of streams."""
    if shutil.which("nginx") is None:
        raise SystemExit("nginx is not installed: it is the upstream of this benchmark")
    home.mkdir(parents=True, exist_ok=True)
    (home / "void").mkdir(exist_ok=True)
    (home / "whole.json").write_text(json.dumps(_answer()))
    (home / "stream.txt").write_text(_stream())
    ports = [free_port(), free_port()]
    servers = [
        _SERVER.format(port=ports[0], home=home, file="whole.json", kind="application/json"),
        _SERVER.format(port=ports[1], home=home, file="stream.txt", kind="text/event-stream"),
    ]
    conf = home / "nginx.conf"
    # A worker of another user could not read a private directory.
    user = "user root;" if os.geteuid() == 0 else ""
    conf.write_text(_CONF.format(home=home, user=user, servers="".join(servers)))
    process = subprocess.Popen(["nginx", "-c", str(conf), "-p", str(home)], stderr=subprocess.PIPE)
    try:
        for port in ports:
            wait_for_port(port)
        yield f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}"
    finally:
        process.terminate()
        process.communicate(timeout=10)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


def wait_for_port(
    port: int, timeout_s: float = 60, process: "subprocess.Popen[bytes] | None" = None
) -> None:
    """OSError once the time is over, or the process that should listen."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            over = process is not None and process.poll() is not None
            if over or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _answer() -> dict[str, object]:
    message = {"role": "assistant", "content": WHOLE_TEXT}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "mock",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30},
    }


def _stream() -> str:
    shell = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
    lines = []
    for number, word in enumerate(STREAM_TEXT.split()):
        reason = "stop" if number == CHUNKS - 1 else None
        choice = {"index": 0, "delta": {"content": f" {word}"}, "finish_reason": reason}
        lines.append({**shell, "choices": [choice]})
    usage = {"prompt_tokens": 20, "completion_tokens": CHUNKS, "total_tokens": 20 + CHUNKS}
    lines.append({**shell, "choices": [], "usage": usage})
    return "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n"
