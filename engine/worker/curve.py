"""ZeroMQ's CURVE encryption: an engine accepts only gateways whose public key is listed."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from engine.config import EngineConfig
from engine.errors import ConfigError

log = logging.getLogger("tollhouse.engine")
_Z85_CHARS = 40


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A gateway's key pair and the engine's public key, all in Z85."""

    server_public: bytes
    public: bytes
    secret: bytes

    @staticmethod
    def load(own_key_file: str, server_key_file: str) -> "ClientKeys":
        """Reads certificate files of `zmq.auth.create_certificates`. Raises ConfigError."""
        public, secret = _certificate(own_key_file)
        server_public, _ = _certificate(server_key_file)
        if secret is None:
            raise ConfigError(f"{own_key_file} has no secret key: use the .key_secret file")
        return ClientKeys(server_public, public, secret)

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class AllowedKeys:
    """ZeroMQ's callback: whether a client's key is allowed. The file is read again when it has changed,
    so that a gateway's key is exchanged without a restart; one that cannot be read, or lists a text that
    is no key, changes nothing. A connection that is open already stays so."""

    def __init__(self, path: str) -> None:
        """ConfigError for a file that cannot be used."""
        self._path = Path(path)
        self._stamp = self._stamp_now()
        self._keys = self._read()

    def callback(self, domain: str, key: bytes) -> bool:
        stamp = self._stamp_now()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = self._read()
            except ConfigError as error:
                log.error("the accepted keys stay as they were: %s", error.message)
            else:
                log.info("%s was read again: %d keys are accepted", self._path, len(self._keys))
        return z85_key(key) in self._keys

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> frozenset[bytes]:
        try:
            lines = self._path.read_text().split()
        except (OSError, ValueError) as error:
            raise ConfigError(f"client_keys_file {self._path} cannot be read: {error}") from error
        for line in lines:
            if len(line) != _Z85_CHARS or not line.isascii():
                raise ConfigError(
                    f"client_keys_file {self._path} lists {line[:50]!r}; a public key has "
                    f"{_Z85_CHARS} characters: write one key a line"
                )
        return frozenset(line.encode() for line in lines)


def z85_key(key: bytes) -> bytes:
    """The Z85 form of a key given in Z85 or as raw bytes."""
    from zmq.utils import z85

    return key if len(key) == 40 else z85.encode(key)


def enable_curve(
    context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", config: EngineConfig
) -> ThreadAuthenticator | None:
    """Enable CURVE on a server socket if the settings ask for it. The caller must stop the
    returned authenticator."""
    if config.server_key_file is None:
        if config.client_keys_file is not None:
            raise ConfigError("client_keys_file is set without server_key_file: set both")
        return None
    if config.client_keys_file is None:
        raise ConfigError(
            "server_key_file is set without client_keys_file: set both, or any key is accepted"
        )
    public, secret = _certificate(config.server_key_file)
    if secret is None:
        raise ConfigError(f"{config.server_key_file} has no secret key: use the .key_secret file")
    allowed = AllowedKeys(config.client_keys_file)
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", allowed)
    socket.curve_server = True
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    return authenticator


def _certificate(path: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
