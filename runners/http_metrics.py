"""Requests by route: how many ended with which status, how long they took, how many are under way.

In place of BentoML's, which label by the path as it was sent: each one not seen before costs some 23 KB for good, known
to the server or not. Labels here come from what the server knows: templates of routes, methods, statuses.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runners.histogram import Histogram, cumulative
from runners.request_metrics import LATENCY_BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client import Metric

request_logger = logging.getLogger("runners.requests")

ROUTE_KEY = "wavelane.route"
"""Where an endpoint leaves the template of its route in the scope of a request."""
OTHER = "other"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_RAISED = 500  # what the server makes of a handler that raises before it has answered


class HttpMetrics:
    """Over all requests of this process."""

    def __init__(self) -> None:
        self.in_progress = 0
        self._ended: Counter[tuple[str, str, int]] = Counter()
        self._durations: dict[tuple[str, str], Histogram] = {}

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """A request's last byte has gone, or its client has."""
        if method not in _METHODS:
            method = OTHER
        self._ended[route, method, status] += 1
        durations = self._durations.get((route, method))
        if durations is None:
            durations = self._durations[route, method] = Histogram(LATENCY_BOUNDS_S)
        durations.observe(seconds)

    def collect(self, prefix: str) -> Iterator[Metric]:
        """As metric families, under the names that vLLM has them by, with our prefix."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        yield GaugeMetricFamily(
            prefix + "http_requests_in_progress", "HTTP requests under way.", value=self.in_progress
        )
        total = CounterMetricFamily(
            prefix + "http_requests",
            "HTTP requests by route, method and status.",
            labels=["handler", "method", "status"],
        )
        for (route, method, status), count in self._ended.items():
            total.add_metric([route, method, str(status)], count)
        yield total
        durations = HistogramMetricFamily(
            prefix + "http_request_duration_seconds",
            "From a request's head to the last byte of its answer.",
            labels=["handler", "method"],
        )
        for (route, method), histogram in self._durations.items():
            durations.add_metric(
                [route, method], cumulative(histogram.bounds, histogram.counts), sum_value=histogram.total
            )
        yield durations


class CountRequests:
    """ASGI layer around the whole service. `bentoml_paths` are those that BentoML answers itself.

    It also logs what no endpoint of ours has seen, one line of JSON each, but for `unlogged_paths`; None: nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        bentoml_paths: Collection[str],
        unlogged_paths: Collection[str] | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._bentoml_paths = frozenset(bentoml_paths)
        self._unlogged_paths = unlogged_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _RAISED
        started_at = time.monotonic()

        async def noting_the_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._metrics.in_progress += 1
        try:
            await self._app(scope, receive, noting_the_status)
        finally:
            seconds = time.monotonic() - started_at
            self._metrics.in_progress -= 1
            self._metrics.ended(self._route(scope), scope["method"], status, seconds)
            if ROUTE_KEY not in scope:
                self._log(scope, status, seconds)

    def _route(self, scope: Scope) -> str:
        route: Any = scope.get(ROUTE_KEY)
        if route is not None:
            return str(route)
        path: str = scope["path"]
        return path if path in self._bentoml_paths else OTHER

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        method, path = scope["method"], scope["path"]
        if self._unlogged_paths is not None and path not in self._unlogged_paths:
            line = {"method": method, "path": path, "status": status, "duration_s": round(seconds, 6)}
            request_logger.info("%s", msgspec.json.encode(line).decode())
