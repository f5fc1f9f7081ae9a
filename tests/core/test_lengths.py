"""Every text of a usage event fits its column, and the API admits nothing longer."""

from typing import get_args, get_type_hints

import pytest

from billing.usage.tables import EngineReceipt, UsageEventRow
from core import lengths
from core.errors import BadRequest
from core.events import EngineCount, OpenedRequest, UsageEvent
from gateway.edge.decoding import check_label
from gateway.serving.headers import read_options


def texts(kind: type) -> set[str]:
    """Fields of a record that hold text."""
    hints = get_type_hints(kind)
    return {
        name
        for name in kind.__struct_fields__  # type: ignore[attr-defined]
        if any(
            isinstance(t, type) and issubclass(t, str)
            for t in get_args(hints[name]) or [hints[name]]
        )
    }


def widths(table: type) -> dict[str, int | None]:
    columns = table.__table__.columns  # type: ignore[attr-defined]
    return {c.name: getattr(c.type, "length", None) for c in columns}


def test_every_text_of_an_event_has_a_length_and_a_column_of_that_width() -> None:
    assert texts(UsageEvent) <= lengths.EVENT.keys()
    assert texts(OpenedRequest) <= lengths.EVENT.keys()
    columns = widths(UsageEventRow)
    assert {name: columns[name] for name in texts(UsageEvent)} == {
        name: lengths.EVENT[name] for name in texts(UsageEvent)
    }
    receipts = widths(EngineReceipt)
    assert all(receipts[name] == lengths.EVENT[name] for name in texts(EngineCount))


class _Exchange:
    def __init__(self, value: str) -> None:
        self.headers = {b"x-request-id": value.encode()}

    def header(self, name: bytes) -> str | None:
        return self.headers[name].decode() if name in self.headers else None


@pytest.mark.parametrize("extra", [0, 1])
def test_the_api_s_bound_is_the_column_s_width(extra: int) -> None:
    columns = widths(UsageEventRow)
    user = "u" * ((columns["end_user"] or 0) + extra)
    sent = "r" * ((columns["client_request_id"] or 0) + extra)
    if not extra:
        assert check_label("user", user) == user
        assert read_options(_Exchange(sent), 60, "").client_request_id == sent  # type: ignore[arg-type]
        return
    with pytest.raises(BadRequest):
        check_label("user", user)
    with pytest.raises(BadRequest):
        read_options(_Exchange(sent), 60, "")  # type: ignore[arg-type]
