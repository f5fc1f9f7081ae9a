"""A server that speaks S3, for tests of what stores objects."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

Answer = Callable[[dict[str, Any], Any], Iterable[bytes]]


@contextmanager
def s3_server(around: Callable[[Answer], Answer] = lambda answer: answer) -> Iterator[str]:
    """Its address. `around`: a WSGI application in front of the store's."""
    store = DomainDispatcherApplication(create_backend_app)
    server = make_server(
        "127.0.0.1", 0, around(store), threaded=True, request_handler=MotoRequestHandler
    )
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
