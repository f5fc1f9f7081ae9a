"""CURVE: only gateways whose public key is on the list may speak with an engine over tcp."""

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
    """What a gateway needs: its own pair, and the engine's public key (Z85)."""

    server_public: bytes
    public: bytes
    secret: bytes

    @staticmethod
    def load(own_key_file: str, server_key_file: str) -> "ClientKeys":
        """From certificate files as `zmq.auth.create_certificates` writes them."""
        public, secret = _certificate(own_key_file)
        server_public, _ = _certificate(server_key_file)
        if secret is None:
            raise ConfigError(f"{own_key_file} has no secret key")
        return ClientKeys(server_public, public, secret)

    def apply(self, socket: "zmq.Socket[Any]") -> None:
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.public
        socket.curve_secretkey = self.secret


class _Listed:
    """Answers ZeroMQ whether a client's key is one of ours."""

    def __init__(self, keys: set[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return zmq_z85(key) in self._keys


def zmq_z85(key: bytes) -> bytes:
    """The printable form of a key, whichever form it has."""
    from zmq.utils import z85

    return key if len(key) == 40 else z85.encode(key)


def guard(
    context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", config: EngineConfig
) -> ThreadAuthenticator | None:
    """Put CURVE on a server socket if the settings ask for it; the result must be stopped."""
    if config.server_key_file is None:
        if config.client_keys_file is not None:
            raise ConfigError("client_keys_file needs server_key_file beside it")
        return None
    if config.client_keys_file is None:
        raise ConfigError("server_key_file needs client_keys_file: else any key would be let in")
    public, secret = _certificate(config.server_key_file)
    if secret is None:
        raise ConfigError(f"{config.server_key_file} has no secret key")
    try:
        lines = Path(config.client_keys_file).read_text().split()
    except OSError as error:
        raise ConfigError(f"client_keys_file {config.client_keys_file}: {error}") from error
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _Listed({line.encode() for line in lines}))
    socket.curve_server = True
    socket.curve_publickey = public
    socket.curve_secretkey = secret
    return authenticator


def _certificate(path: str) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"key file {path}: {error}") from error
