"""Any exception as the OpenAI error object, its status and its headers."""

from __future__ import annotations

import logging
import math

import msgspec

from runners.errors import (
    AuthenticationError,
    EngineUnavailableError,
    HeadersTooLargeError,
    RateLimitError,
    RequestBodyTimeoutError,
    ServerError,
    WavelaneError,
)

logger = logging.getLogger(__name__)

# The whole body stays under 4 KB even when every character of a field is escaped to six bytes.
_MAX_MESSAGE_CHARS = 500
_MAX_PARAM_CHARS = 60
_UNAVAILABLE_RETRY_S = 2.0

Headers = list[tuple[bytes, bytes]]


def as_wavelane_error(error: Exception) -> WavelaneError:
    """Errors of the tree as they are; anything else is logged and becomes a 500 that tells the client nothing more."""
    if isinstance(error, WavelaneError):
        return error
    logger.error("request failed", exc_info=error)
    return ServerError("The server failed while it handled this request.", code="internal_error")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def error_body(error: WavelaneError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}` as JSON, always under 4 KB."""
    return msgspec.json.encode(
        {
            "error": {
                # A lone surrogate would make the message impossible to encode.
                "message": _shortened(error.message, _MAX_MESSAGE_CHARS).encode("utf-8", "replace").decode("utf-8"),
                "type": error.type,
                "param": None if error.param is None else _shortened(error.param, _MAX_PARAM_CHARS),
                "code": error.code,
            }
        }
    )


def error_headers(error: WavelaneError) -> Headers:
    """`Retry-After` [whole seconds] where trying again makes sense, and what HTTP asks for beside some statuses."""
    if isinstance(error, RateLimitError):
        return [(b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s)))]
    if isinstance(error, EngineUnavailableError):
        return [(b"retry-after", b"%d" % _UNAVAILABLE_RETRY_S)]
    if isinstance(error, AuthenticationError):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, HeadersTooLargeError | RequestBodyTimeoutError):
        return [(b"connection", b"close")]
    return []
