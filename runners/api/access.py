"""Who calls, and whether they may: API keys, and each key's rate and concurrency."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from runners.errors import AuthenticationError, PermissionDeniedError, RateLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from configs.operation import ApiKeySection

_BUSY_RETRY_S = 1.0


class Caller:
    """One API key in use. Its rate is a token bucket that holds a minute's worth of requests."""

    __slots__ = ("_allowance", "_filled_at", "_requests_per_minute", "in_flight", "is_admin", "max_concurrency", "name")

    def __init__(self, key: ApiKeySection, now: float) -> None:
        self.name = key.name
        self.is_admin = key.admin
        self.max_concurrency = key.max_concurrency
        self.in_flight = 0
        self._requests_per_minute = key.requests_per_minute
        self._allowance = float(key.requests_per_minute or 0)
        self._filled_at = now

    def charge(self, now: float) -> None:
        """Count one more request. RateLimitError, and nothing counted, when it is over a limit of this key."""
        if self.max_concurrency is not None and self.in_flight >= self.max_concurrency:
            raise RateLimitError(
                f"This API key has {self.in_flight} requests in flight, as many as it may.",
                retry_after_s=_BUSY_RETRY_S,
                code="concurrency_limit_exceeded",
            )
        rate = self._requests_per_minute
        if rate is None:
            return
        self._allowance = min(float(rate), self._allowance + (now - self._filled_at) * rate / 60)
        self._filled_at = now
        if self._allowance < 1:
            raise RateLimitError(
                f"This API key may send {rate} requests a minute.", retry_after_s=(1 - self._allowance) * 60 / rate
            )
        self._allowance -= 1


class Access:
    """Every key of the server. Without keys everyone may do everything but what needs an admin key."""

    def __init__(self, keys: Sequence[ApiKeySection] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._callers = [(bytes.fromhex(key.sha256), Caller(key, clock())) for key in keys]

    @contextmanager
    def request(
        self, headers: Iterable[tuple[bytes, bytes]], *, needs_admin: bool, is_metered: bool = True
    ) -> Iterator[Caller | None]:
        """Around one request: who sends it, None where keys are not asked for.

        One that is not metered counts neither towards the key's rate nor towards its concurrency.

        AuthenticationError without a valid key, PermissionDeniedError where only an admin may, RateLimitError.
        """
        caller = self._identify(headers) if self._callers else None
        if needs_admin and (caller is None or not caller.is_admin):
            raise PermissionDeniedError("This needs an admin key.")
        if caller is None or not is_metered:
            yield caller
            return
        caller.charge(self._clock())
        caller.in_flight += 1
        try:
            yield caller
        finally:
            caller.in_flight -= 1

    def _identify(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        value = next((value for name, value in headers if name == b"authorization"), None)
        if value is None:
            raise AuthenticationError("An API key is needed: send it as 'Authorization: Bearer KEY'.")
        scheme, _, key = value.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        # Every hash is looked at, each in constant time: how long it takes says nothing about which key is near.
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        if found is None or scheme.lower() != b"bearer":
            raise AuthenticationError("The API key is not valid.")
        return found
