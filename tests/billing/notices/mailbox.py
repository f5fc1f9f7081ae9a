"""A mail server of a few lines: takes every mail and keeps it, with the credentials that it was given."""

import base64
import socketserver
import ssl
import threading


class Mailbox:
    def __init__(self, secure: ssl.SSLContext | None = None) -> None:
        """`secure` is the server's side of smtps."""
        self.mails: list[str] = []
        self.logins: list[tuple[str, str]] = []
        mails, logins = self.mails, self.logins

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
                    if word == b"EHLO":
                        self.wfile.write(b"250-here\r\n250 AUTH PLAIN\r\n")
                        continue
                    if word == b"AUTH":
                        _, name, password = base64.b64decode(line.split()[2]).decode().split("\0")
                        logins.append((name, password))
                        self.wfile.write(b"235 welcome\r\n")
                        continue
                    self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
                    if word == b"QUIT":
                        return

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)
        if secure is not None:
            self._server.socket = secure.wrap_socket(self._server.socket, server_side=True)
        scheme = "smtp" if secure is None else "smtps"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
