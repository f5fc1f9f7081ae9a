"""/admin/v1/events: CloudEvents of usage that Tollhouse did not serve."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import AwareDatetime, BaseModel, Discriminator, Field, Tag

from billing import reported_usage
from billing.reported_usage import Report
from core import lengths
from core.events import UsageKind
from gateway.api.admin.access import OperatorContext, RequireOperator
from gateway.api.admin.billing_schemas import Body

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]
Tokens = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Units = Annotated[int, Field(strict=True, ge=0, le=10**9)]


class Measures(Body):
    """`data` of an event. Other units than tokens and seconds are counted by `requests`."""

    model: str = Field(min_length=1, max_length=lengths.NAME, description="As its price names it.")
    adapter: str | None = Field(None, min_length=1, max_length=lengths.NAME)
    project: str = Field("", max_length=lengths.NAME, description="Name or id.")
    input_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    output_tokens: Tokens = 0
    requests: Units | None = None
    seconds: Units | None = None


class CloudEvent(BaseModel):
    """Structured mode of CloudEvents 1.0. Extension attributes are ignored."""

    specversion: Literal["1.0"]
    id: str = Field(min_length=1, max_length=lengths.CLIENT_REQUEST_ID, pattern=r"^[^\x00]*$")
    source: str = Field(min_length=1, max_length=lengths.EVENT_SOURCE, pattern=r"^[^\x00]*$")
    type: UsageKind
    subject: str = Field(min_length=1, max_length=lengths.NAME, description="Tenant, name or id.")
    time: AwareDatetime | None = Field(None, description="Of the use; the arrival by default.")
    datacontenttype: Literal["application/json"] = "application/json"
    data: Measures


def _form(body: Any) -> str:
    return "batch" if isinstance(body, list) else "event"


Batch = Annotated[list[CloudEvent], Field(min_length=1, max_length=1000)]
Events = Annotated[
    Annotated[CloudEvent, Tag("event")] | Annotated[Batch, Tag("batch")], Discriminator(_form)
]


@router.post("/events")
def report_events(body: Events, ctx: WriteAccess) -> dict[str, int]:
    """Store one event (application/cloudevents+json) or a list (application/cloudevents-batch+json).
    Events whose source and id are known are not stored again. 400: an event has no price, and none of
    the call is stored; 409: a known event was sent with other contents.
    """
    reports = [_report(each) for each in (body if isinstance(body, list) else [body])]
    with ctx.database.transaction() as session:
        done = reported_usage.report(session, ctx.clock, reports, ctx.actor.id)
    return done.describe()


def _report(event: CloudEvent) -> Report:
    return Report(
        source=event.source,
        id=event.id,
        kind=event.type,
        subject=event.subject,
        at=event.time,
        **event.data.model_dump(),
    )
