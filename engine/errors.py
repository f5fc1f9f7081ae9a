"""The engine's errors, each with a code that a gateway can act on."""


class EngineError(Exception):
    """The root of the engine's errors. `code` is stable; the message names cause and next step."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ConfigError(EngineError):
    """An invalid setting; the message names it."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_config", message)


class RequestError(EngineError):
    """A request that the engine refuses; sent to the gateway as a `Refusal`."""


class AdapterError(EngineError):
    """An adapter that cannot be loaded, found or used; the message names the file or field."""


class CheckpointError(EngineError):
    """A base model directory that cannot be served; the message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__("invalid_checkpoint", message)


class IntegrityError(EngineError):
    """The engine's records contradict each other. It stops, so that no request is computed with
    another tenant's state."""

    def __init__(self, message: str) -> None:
        super().__init__("integrity", message)


class RankError(IntegrityError):
    """The ranks of a group no longer compute one model together; the message names the one at fault. The
    engine stops, and with it all ranks."""


class ConnectionLost(EngineError):
    """The engine stopped answering. Its receipts count the tokens that it delivered. `begun`: it had
    begun with this request, or was reading this adapter, which may be the cause."""

    def __init__(self, message: str, *, begun: bool = False) -> None:
        super().__init__("engine_unavailable", message)
        self.begun = begun
