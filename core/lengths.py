"""Lengths of stored texts, in characters: the bounds of the API and the widths of the columns.

SQLite stores longer texts and PostgreSQL refuses them, so both sides use these constants.
"""

ID = 40
NAME = 120
KIND = 20
ROUTE = 80
DIGEST = 64
ENGINE = 80
FINISH_REASON = 40
MODERATION = 20
PROMPT_ORDER = 40
TRUNCATED = 40
ROUTED = 120
PAID_BY = 10
COUNTED_BY = 10
COMPONENTS = 320  # nine names with counts, as JSON
# Anthropic's `metadata.user_id` may have 256 characters, OpenAI's `safety_identifier` 64.
END_USER = 256
CLIENT_REQUEST_ID = 200
EVENT_SOURCE = 200  # of a CloudEvent
LABELS = 450  # as `core.labels.LONGEST`
DEDUPE = 200  # of a queued message's cause and target

# By field of UsageEvent and OpenedRequest.
EVENT = {
    "request_id": ID,
    "tenant_id": ID,
    "project_id": ID,
    "key_id": ID,
    "member_id": ID,
    "batch_job": ID,
    "price_version": ID,
    "kind": KIND,
    "settled_by": KIND,
    "route": ROUTE,
    "model": NAME,
    "adapter": NAME,
    "adapter_digest": DIGEST,
    "finish_reason": FINISH_REASON,
    "engine_id": ENGINE,
    "end_user": END_USER,
    "client_request_id": CLIENT_REQUEST_ID,
    "moderation": MODERATION,
    "prompt_order": PROMPT_ORDER,
    "truncated": TRUNCATED,
    "routed": ROUTED,
    "paid_by": PAID_BY,
    "counted_by": COUNTED_BY,
    "labels": LABELS,
}
# Descriptions and correlation: cut at their length, because billing does not depend on them. A
# longer value of any other field is refused.
CUT = (
    *("finish_reason", "engine_id", "end_user", "client_request_id"),
    *("moderation", "prompt_order", "truncated", "routed"),
)
