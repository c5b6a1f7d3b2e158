"""BentoML's timeout to the first byte of an answer, left out: it keeps memory for every request until it would act.

Its layer starts a timer a request and never cancels it (measured: 750 bytes of every request, for a day at the timeout
that long answers need). `limits.request_deadline_s` bounds a request, `http.body_timeout_s` its arrival.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from starlette.types import ASGIApp


def drop_first_byte_timeout() -> None:
    """Let every service that BentoML starts from now on in this process go without that layer."""
    traffic: Any = import_module("bentoml._internal.server.http.traffic")
    # The name is looked up when a service's app is built, and called with the app behind it.
    traffic.TimeoutMiddleware = _nothing_between


def _nothing_between(app: ASGIApp, timeout: float) -> ASGIApp:
    return app
