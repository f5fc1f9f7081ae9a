"""Templates of Stripe's objects with all their fields, from `shapes.json`."""

import copy
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

Object = dict[str, Any]
_PREFIXES = {
    "customer": "cus",
    "invoice": "in",
    "line_item": "il",
    "invoice_payment": "inpay",
    "payment_intent": "pi",
    "charge": "ch",
    "refund": "re",
    "dispute": "dp",
    "setup_intent": "seti",
    "checkout.session": "cs_test",
    "payment_method": "pm",
    "credit_note": "cn",
    "event": "evt",
}


class ApiError(Exception):
    """An error response of the API."""

    def __init__(self, status: int, message: str, *, kind: str = "", **fields: Any) -> None:
        super().__init__(message)
        plain = "card_error" if status == 402 else "invalid_request_error"
        self.status = status
        self.body = {"error": {"type": kind or plain, "message": message, **fields}}


@cache
def _shapes() -> dict[str, Object]:
    read: dict[str, Object] = json.loads((Path(__file__).parent / "shapes.json").read_text())
    return read


class Maker:
    """Creates objects with sequential ids, so that runs are reproducible."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def make(self, kind: str, now: int, **fields: Any) -> Object:
        made = copy.deepcopy(_shapes()[kind])
        if "id" in made:
            prefix = _PREFIXES[kind]
            self._made[prefix] += 1
            made["id"] = f"{prefix}_{self._made[prefix]:016d}"
        if "created" in made:
            made["created"] = now
        return made | fields


def listing(url: str, data: list[Object], *, has_more: bool = False) -> Object:
    return {"object": "list", "url": url, "data": data, "has_more": has_more}
