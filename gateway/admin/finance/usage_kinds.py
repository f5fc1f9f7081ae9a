"""/v1/organization/usage of embeddings, moderations, speech, transcriptions and images, in OpenAI's
format."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from billing.usage.usage_buckets import BucketRow
from core.events import UsageKind
from gateway.admin.access import AdminContext
from gateway.admin.finance import schemas as shapes
from gateway.admin.finance.routes import UsageReadAccess, as_json, buckets_of, parameters_of
from gateway.serving.api.bodies import reads_query

router = APIRouter(prefix="/v1/organization/usage", tags=["finance"])
PARAMETERS = tuple(name for name in shapes.PARAMETERS if name != "batch")
GROUPS = {name: ours for name, ours in shapes.USAGE_GROUPS.items() if name != "batch"}


@dataclass(frozen=True, slots=True)
class UsageOfKind:
    """`measure` is OpenAI's name of what is counted besides requests, and the column that counts it."""

    name: str
    kind: UsageKind
    measure: tuple[str, str]
    requests: str = "requests"  # the column

    def result(self, row: BucketRow) -> dict[str, Any]:
        name, column = self.measure
        groups = {
            theirs: row.group.get(ours) or None
            for theirs, ours in GROUPS.items()
            if theirs != "adapter" or ours in row.group
        }
        return {
            "object": f"organization.usage.{self.name}.result",
            name: row.counts[column],
            "num_model_requests": row.counts[self.requests],
            **groups,
            **shapes.labels_of(row),
        }


EMBEDDINGS = UsageOfKind("embeddings", UsageKind.EMBEDDING, ("input_tokens", "input_tokens"))
MODERATIONS = UsageOfKind(
    "moderations", UsageKind.MODERATION, ("input_tokens", "input_tokens"), "moderation_calls"
)
SPEECHES = UsageOfKind("audio_speeches", UsageKind.SPEECH, ("characters", "characters"))
TRANSCRIPTIONS = UsageOfKind("audio_transcriptions", UsageKind.AUDIO, ("seconds", "audio_seconds"))
IMAGES = UsageOfKind("images", UsageKind.IMAGE, ("images", "images"))
ALL = (EMBEDDINGS, MODERATIONS, SPEECHES, TRANSCRIPTIONS, IMAGES)


@router.get("/embeddings")
@reads_query(*PARAMETERS)
def embeddings_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Tokens and requests of embeddings."""
    return _answer(EMBEDDINGS, request, ctx)


@router.get("/moderations")
@reads_query(*PARAMETERS)
def moderations_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Calls of /v1/moderations, which counts no tokens: `input_tokens` is 0."""
    return _answer(MODERATIONS, request, ctx)


@router.get("/audio_speeches")
@reads_query(*PARAMETERS)
def speeches_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Spoken characters and requests."""
    return _answer(SPEECHES, request, ctx)


@router.get("/audio_transcriptions")
@reads_query(*PARAMETERS)
def transcriptions_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Seconds of audio that were transcribed or translated, and requests."""
    return _answer(TRANSCRIPTIONS, request, ctx)


@router.get("/images")
@reads_query(*PARAMETERS)
def images_usage(request: Request, ctx: UsageReadAccess) -> Response:
    """Images that were made, and requests."""
    return _answer(IMAGES, request, ctx)


def _answer(usage: UsageOfKind, request: Request, ctx: AdminContext) -> Response:
    given = parameters_of(request)
    query, _ = shapes.usage_query(given, ctx.clock.now(), GROUPS)
    page = buckets_of(ctx, query, (usage.kind.value,), shapes.labels_asked(given))
    return as_json(shapes.page_of(page, lambda row: [usage.result(row)]))
