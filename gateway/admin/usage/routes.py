"""CloudEvents of usage that Tollhouse did not serve: /admin/v1/events by the operator for any tenant,
/v1/events by an organisation's own key."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import AwareDatetime, BaseModel, Discriminator, Field, Tag, ValidationError

from billing.usage import reported_usage
from billing.usage.reported_usage import Report
from core import lengths
from core.events import UsageKind
from gateway.admin.access import AdminContext, OperatorContext, RequireOperator, RequirePermission
from gateway.admin.billing.schemas import Body

router = APIRouter(prefix="/admin/v1", tags=["billing-admin"])
own_router = APIRouter(prefix="/v1", tags=["finance"])
WriteAccess = Annotated[OperatorContext, Depends(RequireOperator("prices", "write"))]
OwnWriteAccess = Annotated[AdminContext, Depends(RequirePermission("usage", "write"))]
Tokens = Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)]
Units = Annotated[int, Field(strict=True, ge=0, le=10**9)]


class Measures(Body):
    """`data` of an event. Units that it does not name are counted by `requests`."""

    model: str = Field(
        min_length=1, max_length=lengths.NAME, description="Model name, as in its price."
    )
    adapter: str | None = Field(None, min_length=1, max_length=lengths.NAME)
    project: str = Field("", max_length=lengths.NAME, description="Project, by name or id.")
    input_tokens: Tokens = 0
    cached_tokens: Tokens = 0
    output_tokens: Tokens = 0
    requests: Units | None = None
    seconds: Units | None = None
    characters: Units | None = None
    images: Units | None = None


class OwnCloudEvent(BaseModel):
    """Structured mode of CloudEvents 1.0. Extension attributes are ignored."""

    specversion: Literal["1.0"]
    id: str = Field(min_length=1, max_length=lengths.CLIENT_REQUEST_ID, pattern=r"^[^\x00]*$")
    source: str = Field(min_length=1, max_length=lengths.EVENT_SOURCE, pattern=r"^[^\x00]*$")
    type: UsageKind
    subject: str = Field("", max_length=lengths.NAME, description="Your own organisation.")
    time: AwareDatetime | None = Field(
        None, description="Time of the use; default: the time of arrival."
    )
    datacontenttype: Literal["application/json"] = "application/json"
    data: Measures


class CloudEvent(OwnCloudEvent):
    subject: str = Field(min_length=1, max_length=lengths.NAME, description="Tenant, name or id.")


def _form(body: Any) -> str:
    return "batch" if isinstance(body, list) else "event"


Batch = Annotated[list[CloudEvent], Field(min_length=1, max_length=1000)]
Events = Annotated[
    Annotated[CloudEvent, Tag("event")] | Annotated[Batch, Tag("batch")], Discriminator(_form)
]
OwnBatch = Annotated[list[OwnCloudEvent], Field(min_length=1, max_length=1000)]
OwnEvents = Annotated[
    Annotated[OwnCloudEvent, Tag("event")] | Annotated[OwnBatch, Tag("batch")],
    Discriminator(_form),
]


@router.post("/events")
def report_events(body: Events, ctx: WriteAccess) -> dict[str, int]:
    """Store one event (application/cloudevents+json) or a list (application/cloudevents-batch+json).
    Events whose source and id are known are not stored again. 400: an event has no price, and none of
    the call is stored; 409: a known event was sent with other contents.
    """
    reports = [_report_of(each) for each in (body if isinstance(body, list) else [body])]
    with ctx.database.transaction() as session:
        done = reported_usage.report(session, ctx.clock, reports, ctx.actor.id)
    return done.describe()


@own_router.post("/events")
def report_own_events(body: OwnEvents, ctx: OwnWriteAccess) -> dict[str, int]:
    """Store one event (application/cloudevents+json) or a list (application/cloudevents-batch+json) of
    your own organisation, with a key that may write usage: by default an owner's, which `scopes.routes`
    can restrict to /v1/events. Source and id are yours alone; sent again, an event is not stored again.
    """
    reports = [_report_of(each) for each in (body if isinstance(body, list) else [body])]
    with ctx.database.transaction() as session:
        done = reported_usage.report_own(session, ctx.scope, ctx.clock, reports)
    return done.describe()


def report_from(payload: Any) -> Report:
    """A CloudEvent of the operator, from decoded JSON. ValueError names the first wrong field."""
    try:
        return _report_of(CloudEvent.model_validate(payload))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"])) or "the event"
        raise ValueError(f"{where}: {problem['msg']}") from None


def _report_of(event: OwnCloudEvent) -> Report:
    return Report(
        source=event.source,
        id=event.id,
        kind=event.type,
        subject=event.subject,
        at=event.time,
        **event.data.model_dump(),
    )
