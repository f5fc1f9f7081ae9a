"""The error tree. Each error has a code, an HTTP status and a next step for the caller.

TollhouseError
├── SettingError            a wrong setting stops the start and names the variable
├── InvariantBroken         an internal invariant failed; serving stops
├── BadRequest 400
│   ├── ContextLengthExceeded
│   ├── UnsupportedParameter
│   └── ContentBlocked
├── Unauthenticated 401
├── Forbidden 403
├── NotFound 404
│   └── ModelNotFound
├── Conflict 409
├── PayloadTooLarge 413
├── RateLimited 429
├── InsufficientQuota 429   terminal: a retry cannot succeed
├── Unavailable 503
│   └── DependencyDown
└── MissingExtra 501        an optional package is not installed here
"""

from http import HTTPStatus


class TollhouseError(Exception):
    """Base of all errors. `message` states the cause, `next_step` what the caller can do about it."""

    status: int = HTTPStatus.INTERNAL_SERVER_ERROR
    code: str = "internal_error"
    type: str = "api_error"  # OpenAI's `error.type`

    def __init__(
        self,
        message: str,
        *,
        next_step: str = "",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".strip()


class SettingError(TollhouseError):
    code = "wrong_setting"


class InvariantBroken(TollhouseError):
    code = "invariant_broken"


class BadRequest(TollhouseError):
    status = HTTPStatus.BAD_REQUEST
    code = "invalid_request"
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"
    prompt_tokens: int | None = None
    max_tokens: int | None = None  # as the client asks for them
    limit: int | None = None  # tokens of the context

    def counted(
        self, prompt_tokens: int | None, max_tokens: int | None, limit: int | None
    ) -> "ContextLengthExceeded":
        """The same error, with what is known of the counts: each API says them in its own words."""
        self.prompt_tokens, self.max_tokens, self.limit = prompt_tokens, max_tokens, limit
        return self


class UnsupportedParameter(BadRequest):
    code = "unsupported_parameter"
    details: dict[str, object] | None = None  # `error.details` on /v1/messages


class ContentBlocked(BadRequest):
    code = "content_filter"


class Unauthenticated(TollhouseError):
    status = HTTPStatus.UNAUTHORIZED
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(TollhouseError):
    status = HTTPStatus.FORBIDDEN
    code = "permission_denied"
    type = "permission_error"


class NotFound(TollhouseError):
    status = HTTPStatus.NOT_FOUND
    code = "not_found"
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class Conflict(TollhouseError):
    status = HTTPStatus.CONFLICT
    code = "conflict"
    type = "invalid_request_error"


class PayloadTooLarge(TollhouseError):
    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    code = "payload_too_large"
    type = "invalid_request_error"


class RateLimited(TollhouseError):
    """`retry_after_s` is when the same request is admitted if no other request arrives first."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


class InsufficientQuota(TollhouseError):
    """Budget or credit is exhausted, or an invoice is overdue. Sent with `x-should-retry: false`."""

    status = HTTPStatus.TOO_MANY_REQUESTS
    code = "insufficient_quota"
    type = "insufficient_quota"


class Unavailable(TollhouseError):
    status = HTTPStatus.SERVICE_UNAVAILABLE
    code = "unavailable"
    type = "server_error"


class EngineLost(Unavailable):
    """The engine hung or died while it computed the request, which may be the cause: it is not tried
    again. Sent with `x-should-retry: false`."""

    code = "engine_unavailable"


class DependencyDown(Unavailable):
    code = "dependency_down"


class MissingExtra(TollhouseError):
    status = HTTPStatus.NOT_IMPLEMENTED
    code = "missing_extra"
