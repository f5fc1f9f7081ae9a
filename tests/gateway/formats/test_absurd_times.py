"""Times that no calendar arithmetic can move, and digits that `int` reads and nobody means: refused by
name, wherever a client, a page or Stripe gives them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from billing.adjustments import act_requests
from billing.payments.base import Refused
from billing.payments.stripe import webhooks
from core.errors import BadRequest
from dashboards import filters, query, request_log
from gateway.admin.finance import schemas as finance_schemas
from gateway.edge.decoding import parse_datetime

WRONG_TIMES = [
    "0001-01-01T00:00:00+14:00",
    "0001-01-01",
    "1969-12-31T23:59:59Z",
    "1970-01-01T00:30:00+01:00",
    "2200-01-01T00:00:00Z",
    "2199-12-31T23:30:00-01:00",
    "9999-12-31T23:59:59-12:00",
    "9999-12-31",
    "٢٠٢٦-٠١-٠١",
    "２０２６-01-01",
    "²026-01-01",
]
READERS: list[Callable[[str], Any]] = [
    parse_datetime,
    lambda text: parse_datetime(text, "start"),
]


@pytest.mark.parametrize("text", WRONG_TIMES)
def test_a_time_out_of_range_is_refused(text: str) -> None:
    for read in READERS:
        with pytest.raises(BadRequest):
            read(text)
    with pytest.raises(ValueError):
        act_requests._moment(text if "T" in text else f"{text}T00:00:00Z")
    with pytest.raises(ValueError):
        request_log._instant(text if "T" in text else f"{text}T00:00:00+00:00")


@pytest.mark.parametrize("text", [each for each in WRONG_TIMES if "T" not in each])
def test_a_day_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        filters.day_of("from", text)
    with pytest.raises(BadRequest):
        query._day("since", text)


@pytest.mark.parametrize("text", ["1970-01-01T00:00:00Z", "2199-12-31T23:59:59.999999Z"])
def test_the_first_and_the_last_usual_time_are_taken(text: str) -> None:
    assert parse_datetime(text).isoformat().startswith(text.rstrip("Z"))


@pytest.mark.parametrize("seconds", ["-1", "7258118400", "999999999999999999", "-62135596800"])
def test_seconds_out_of_range_are_refused(seconds: str) -> None:
    with pytest.raises(BadRequest):
        finance_schemas._time({"start_time": [seconds]}, "start_time")
    with pytest.raises(BadRequest):
        finance_schemas._cursor(f"page_{seconds}")


@pytest.mark.parametrize("page", ["page_٣", "page_²", "page_", "page_1.5", "page_+1"])
def test_digits_of_other_scripts_are_no_cursor(page: str) -> None:
    with pytest.raises(BadRequest):
        finance_schemas._cursor(page)


@pytest.mark.parametrize("created", [10**18, -(10**18), "soon", [1], 1e300])
def test_an_event_of_stripe_with_an_absurd_time_is_refused(created: Any) -> None:
    event = {"id": "evt_1", "type": "charge.refunded", "data": {"object": {"id": "ch_1"}}}
    with pytest.raises(Refused):
        webhooks.read({**event, "created": created})
    assert webhooks.read({**event, "created": 1_767_225_600}).id == "evt_1"


# Where a digit is a property of text, not a number to be read.
TEXTS = (
    "gateway/catalog/adapter_archive.py",  # of bytes
    "gateway/serving/media/transcripts.py",
    "moderation/validators.py",
    "fake_stripe/",
)


def test_numbers_are_read_from_plain_digits_only() -> None:
    """`isdigit` is true of superscripts, which `int` refuses, and of digits of all scripts."""
    root, found = Path(__file__).parents[3], []
    for package in ("billing", "core", "dashboards", "gateway"):
        for path in sorted((root / package).rglob("*.py")):
            if any(part in str(path) for part in TEXTS):
                continue
            text = path.read_text()
            for match in re.finditer(r"(\w+)(?:\.\w+)*\.(?:isdigit|isnumeric|isdecimal)\(\)", text):
                if "isascii" not in text[max(0, match.start() - 200) : match.end()]:
                    found.append(f"{path.relative_to(root)}: {match[0]}")
    assert found == ["core/settings.py: port.isdecimal()"]
