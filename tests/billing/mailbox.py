"""A mail server of a few lines: takes every mail and keeps it."""

import socketserver
import threading


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[str] = []
        mails = self.mails

        class Session(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                self.wfile.write(b"220 ready\r\n")
                for line in iter(self.rfile.readline, b""):
                    word = line.strip().upper()[:4]
                    if word == b"DATA":
                        self.wfile.write(b"354 go on\r\n")
                        body = []
                        for part in iter(self.rfile.readline, b".\r\n"):
                            body.append(part.decode())
                        mails.append("".join(body))
                    self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
                    if word == b"QUIT":
                        return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        self.url = f"smtp://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
