"""What other servers' receipts and the gateway's own requests share with the engine's records."""

from dataclasses import MISSING, Field, fields
from typing import Any

import pytest
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields as fields_of

from engine.protocol import GenerateRequest, Receipt, SamplingParams
from gateway.request.engine import EngineRequest
from gateway.request.receipts import UpstreamReceipt


def _default(field: Field[Any]) -> Any:
    return NODEFAULT if field.default is MISSING else field.default


@pytest.mark.parametrize(
    ("struct", "record"), [(UpstreamReceipt, Receipt), (EngineRequest, GenerateRequest)]
)
def test_fields_of_the_engine_s_record_come_first_in_its_order(
    struct: type[Struct], record: Any
) -> None:
    """A struct of its own is quicker to make than the record; a field that one of them lacks would be
    lost, or sent as another one."""
    theirs = [(each.name, _default(each)) for each in fields(record)]
    ours = [(each.name, each.default) for each in fields_of(struct)]
    assert ours[: len(theirs)] == theirs
    assert len(ours) == len(theirs) or struct is UpstreamReceipt


def test_each_field_is_sent_as_itself() -> None:
    given = {
        "request_id": "r", "namespace": "t", "prompt": [1, 2], "sampling": SamplingParams(3),
        "adapter": "ad", "weight": 2.0, "priority": 4, "deadline_s": 5.0, "note": "n",
        "prediction": [6],
    }  # fmt: skip
    sent = EngineRequest(**given).to_send()
    assert sent == GenerateRequest(**given)  # type: ignore[arg-type]
    assert {each.name for each in fields(sent)} == given.keys()
