"""Facts of accelerators, from `devices.json`: memory, bandwidth, peaks, links and prices, each with its
source and the prices with their date."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from engine.errors import ConfigError

_FILE = Path(__file__).with_name("devices.json")
_GIGA, _TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes, bytes a second and operations a second; `price` is US dollars an hour, None: not known."""

    name: str
    memory: float
    bandwidth: float
    peaks: tuple[tuple[str, float], ...]  # by the type of the products
    link: float
    most_linked: int  # devices that the fast link joins
    source: str
    price: float | None = None
    price_date: str = ""
    price_source: str = ""

    def peak(self, kind: str) -> float:
        return dict(self.peaks)[kind]

    def at_price(self, price: float, source: str = "given") -> "Device":
        return replace(self, price=price, price_date="", price_source=source)


@cache
def devices() -> dict[str, Device]:
    """By name and by each alias."""
    found: dict[str, Device] = {}
    for row in json.loads(_FILE.read_text())["devices"]:
        device = Device(
            name=row["name"],
            memory=row["memory_gb"] * _GIGA,
            bandwidth=row["bandwidth_tb"] * _TERA,
            peaks=tuple(
                (kind, row[f"{kind}_t"] * _TERA) for kind in ("bf16", "fp8", "int8", "fp4")
            ),
            link=row["link_gb"] * _GIGA,
            most_linked=row["most_linked"],
            source=row["source"],
            price=row["price"],
            price_date=row["price_date"],
            price_source=row["price_source"],
        )
        for name in (device.name, *row["aliases"]):
            found[name] = device
    return found


def device(name: str) -> Device:
    """By name in any case. Raises ConfigError with the names that are known."""
    known = devices()
    found = known.get(name.strip().lower())
    if found is None:
        names = ", ".join(sorted({each.name for each in known.values()}))
        raise ConfigError(f"gpu is {name!r}: known are {names}")
    return found
