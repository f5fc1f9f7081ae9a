"""The installed release: its version, and whether Python really imports its packages."""

import importlib.util
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

NAME = "tollhouse"
PACKAGES = ("core", "gateway", "engine", "billing", "moderation", "dashboards", "migrations")
_HERE = Path(__file__).resolve().parents[2]  # no package but this one is imported here


@cache
def version() -> str:
    """Of the installed distribution; `0+source` where the packages run without one."""
    try:
        return distribution(NAME).version
    except PackageNotFoundError:
        return "0+source"


def shadowed() -> dict[str, Path]:
    """The packages that Python finds elsewhere than next to this one, and where. The names are common:
    another distribution, or a folder of the working directory, may have one of them."""
    found = {}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        place = Path(places[0]).resolve() if places else Path()
        if place != _HERE / name:
            found[name] = place
    return found
