"""One error tree: faults of the client (4xx) and faults of the server (5xx).

The HTTP layer turns any of them into the OpenAI error object; nothing else may decide a status code.
"""

from __future__ import annotations

from typing import ClassVar


class WavelaneError(Exception):
    """Base of every error a client may see.

    `param` names the request field at fault, `code` is the machine-readable reason (OpenAI's where OpenAI has one).
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code


class ClientError(WavelaneError):
    """The request is at fault; sending it again unchanged fails again."""

    status = 400
    type = "invalid_request_error"


class InvalidRequestError(ClientError):
    """A field is missing, has the wrong type, or lies outside its range."""


class ContextLengthError(ClientError):
    """Prompt plus completion do not fit the model's context."""

    default_code = "context_length_exceeded"


class AuthenticationError(ClientError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class PermissionDeniedError(ClientError):
    status = 403
    type = "permission_error"
    default_code = "admin_key_required"


class NotFoundError(ClientError):
    """Unknown model, session or route."""

    status = 404
    type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    default_code = "model_not_found"


class MethodNotAllowedError(ClientError):
    status = 405


class ConflictError(ClientError):
    """The session is in use by another request, or was begun with another salt."""

    status = 409
    type = "conflict_error"


class RequestBodyTimeoutError(ClientError):
    """The client began a request and did not send the rest of it."""

    status = 408
    default_code = "request_timeout"


class HeadersTooLargeError(ClientError):
    status = 431
    default_code = "headers_too_large"


class PayloadTooLargeError(ClientError):
    status = 413
    default_code = "payload_too_large"


class RateLimitError(ClientError):
    """Queue or key limit reached; `retry_after_s` is sent as `Retry-After` [seconds]."""

    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class ServerError(WavelaneError):
    """The server is at fault."""


class RequestFailedError(ServerError):
    """The engine failed this one request (a kernel error, NaN logits); others go on."""

    default_code = "request_failed"


class EngineUnavailableError(ServerError):
    """The engine is loading, dead, hung or draining."""

    status = 503
    type = "service_unavailable"
    default_code = "engine_unavailable"


class RequestTimeoutError(ServerError):
    """The request's deadline passed before it finished."""

    status = 504
    type = "timeout_error"
    default_code = "deadline_exceeded"


class StartupError(Exception):
    """Start-up stops with this one line: which file or setting, where, why."""
