"""OpenTelemetry: one span a request, with events where it got its place and where its first token came.

BentoML's own middleware would make a span of every chunk of a stream; its settings (`tracing.sample_rate`, exporter, in
BentoML's configuration) hold for this span too. A caller's `traceparent` header becomes the parent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

from opentelemetry.context import attach
from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider

from runners.request_metrics import RequestTimes

logger = logging.getLogger(__name__)

_PREFIX = "wavelane."


class RequestTracer:
    """Spans of `provider`. Times come in seconds of the monotonic clock."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("wavelane")

    @staticmethod
    def set_parent(headers: Iterable[tuple[bytes, bytes]]) -> None:
        """What the current task does belongs to the trace that the request's headers name, if they name one."""
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        if "traceparent" in carrier:
            attach(extract(carrier))

    def begin(self, request_id: str, model: str, times: RequestTimes) -> Span:
        """A span from the arrival on."""
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": times.num_prompt_tokens,
            _PREFIX + "request_id": request_id,
        }
        start = _wall_ns(times.arrived_at)
        return self._tracer.start_span("generate", kind=SpanKind.SERVER, attributes=attributes, start_time=start)

    @staticmethod
    def end(span: Span, times: RequestTimes, reason: str, *, failed: bool = False) -> None:
        """`reason` is why it finished, or an error code."""
        if times.queue_s is not None:
            span.add_event("scheduled", timestamp=_wall_ns(times.arrived_at + times.queue_s))
        if times.first_at is not None:
            span.add_event("first token", timestamp=_wall_ns(times.first_at))
        span.set_attribute("gen_ai.usage.output_tokens", times.num_generated)
        span.set_attribute("gen_ai.response.finish_reasons", [reason])
        if failed:
            span.set_status(Status(StatusCode.ERROR, reason))
        span.end()


def _wall_ns(monotonic_s: float) -> int:
    return time.time_ns() - int((time.monotonic() - monotonic_s) * 1e9)


def bentoml_tracer() -> RequestTracer | None:
    """A tracer with BentoML's exporter and rate, None where it samples nothing."""
    from bentoml._internal.configuration.containers import BentoMLContainer

    rate = BentoMLContainer.tracing.sample_rate.get()
    if not rate:
        return None
    logger.info("requests are traced, %g of them", rate)
    return RequestTracer(BentoMLContainer.tracer_provider.get())
