"""Cross-origin requests of browsers, where TOLLHOUSE_CORS_ORIGINS allows them.

The key travels in a header, so cookies stay out: the dashboard's session is never sent to a page of
another origin.
"""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

_MAX_AGE_S = 600
# Headers of responses that a page may read.
_EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
    *("ratelimit", "ratelimit-policy", "openai-processing-ms", "idempotency-replayed"),
    *(
        f"x-ratelimit-{what}-{unit}"
        for what in ("limit", "remaining", "reset")
        for unit in ("requests", "tokens")
    ),
    *("x-tollhouse-truncation", "x-tollhouse-fallback", "x-tollhouse-note"),
)


def allow_origins(app: FastAPI, origins: tuple[str, ...]) -> None:
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_MAX_AGE_S,
    )
