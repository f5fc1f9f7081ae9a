"""A server that never ends its answer: it sends one byte at a time, until it is closed."""

import socket
import threading
import time


class SlowServer:
    def __init__(self, beginning: bytes = b"HTTP/1.1 200 OK\r\nx: ", every_s: float = 0.2) -> None:
        """`beginning` is sent at once; empty, for one that accepts and says nothing."""
        self._beginning, self._every_s = beginning, every_s
        self._closed = threading.Event()
        self.asked = threading.Semaphore(0)  # released for each connection that sent something
        self.ended = threading.Semaphore(0)  # released for each connection that the client ended
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        # A listener that is only closed may go on accepting while a thread waits in `accept`.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            if not self._beginning.startswith(b"220"):  # of a mail server, which speaks first
                connection.recv(65_536)
            self.asked.release()
            connection.sendall(self._beginning)
            while not self._closed.is_set():
                if self._beginning:
                    connection.sendall(b"a")
                time.sleep(self._every_s)
        except OSError:
            self.ended.release()
