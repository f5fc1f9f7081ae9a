"""Optional packages belong to the extras of the distribution; a missing one names its extra."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from core.errors import MissingExtra, TollhouseError


@contextmanager
def imports_of(extra: str, what: str, error: type[TollhouseError] = MissingExtra) -> Iterator[None]:
    """Around the imports that `what` needs: a package that is not installed raises `error`."""
    try:
        yield
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        raise error(_says(extra, what, package), next_step=_install(extra)) from missing


def require(module: str, extra: str, what: str, *, instead: str = "") -> None:
    """MissingExtra where the top-level `module` is not installed; imports nothing.

    `instead` ends the next step with what helps without the extra.
    """
    if find_spec(module) is None:
        step = f"{_install(extra)}, {instead}" if instead else _install(extra)
        raise MissingExtra(_says(extra, what, module), next_step=step)


def _says(extra: str, what: str, package: str) -> str:
    return f"{what} needs the extra '{extra}': {package} is not installed."


def _install(extra: str) -> str:
    return f"Run: pip install 'tollhouse[{extra}]'"
