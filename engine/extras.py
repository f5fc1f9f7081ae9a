"""The optional packages of the engine: a missing one names the extra that installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

from engine.errors import ConfigError


@contextmanager
def imports_of(extra: str, what: str) -> Iterator[None]:
    """ConfigError where a package that is imported within is not installed."""
    try:
        yield
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"{what} needs the extra '{extra}': {missing.name} is not installed; run: "
            f"pip install 'tollhouse[{extra}]'"
        ) from missing
