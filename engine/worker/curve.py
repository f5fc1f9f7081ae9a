"""ZeroMQ's CURVE encryption: an engine accepts only gateways whose public key is listed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

from engine.config import EngineConfig
from engine.errors import ConfigError


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


class _AllowedKeys:
    """ZeroMQ's callback: whether a client's key is allowed."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return z85_key(key) in self._keys


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
    try:
        lines = Path(config.client_keys_file).read_text().split()
    except OSError as error:
        raise ConfigError(
            f"client_keys_file {config.client_keys_file} cannot be read: {error}"
        ) from error
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _AllowedKeys({line.encode() for line in lines}))
    socket.curve_server = True
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    return authenticator


def _certificate(path: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {path} cannot be read: {error}") from error
