"""What the engine refuses or fails at, each with a code that a gateway can act on."""


class EngineError(Exception):
    """The root of the engine's errors. `code` is stable; the message names cause and next step."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigError(EngineError):
    """A setting that cannot be; names the field."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_config", message)


class RequestError(EngineError):
    """A request that the engine does not take; becomes a `Refusal`."""


class AdapterError(EngineError):
    """An adapter that cannot be loaded, found or used; names the file or field."""


class CheckpointError(EngineError):
    """A base model directory that cannot be served; names the file."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_checkpoint", message)


class IntegrityError(EngineError):
    """The engine's own books do not agree. It stops rather than serve someone else's state."""

    def __init__(self, message: str) -> None:
        super().__init__("integrity", message)


class ConnectionLost(EngineError):
    """The engine stopped answering; what it already delivered stands in its receipts."""

    def __init__(self, message: str) -> None:
        super().__init__("engine_unavailable", message)
