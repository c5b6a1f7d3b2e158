"""One span a request, read from OpenTelemetry's own in-memory exporter."""

from __future__ import annotations

import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from runners.errors import EngineUnavailableError
from runners.request_metrics import RequestMetrics
from runners.tracing import RequestTracer, bentoml_tracer

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def metrics(exporter: InMemorySpanExporter) -> RequestMetrics:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    metrics = RequestMetrics()
    metrics.tracer = RequestTracer(provider)
    return metrics


def test_a_span_has_the_times_of_its_request(metrics: RequestMetrics, exporter: InMemorySpanExporter) -> None:
    arrived_at = time.monotonic() - 10
    times = metrics.begin("cmpl-1-0", "tiny", 7, arrived_at)
    metrics.queued(times, 2.0)
    for second in (3.0, 4.0, 5.0):
        metrics.tokens(times, 1, arrived_at + second)
    metrics.finish(times, "length", arrived_at + 5)
    (span,) = exporter.get_finished_spans()
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "tiny"
    assert span.attributes["wavelane.request_id"] == "cmpl-1-0"
    assert span.attributes["gen_ai.usage.input_tokens"] == 7
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert span.status.status_code is StatusCode.UNSET
    assert span.start_time is not None
    after_s = {event.name: (event.timestamp - span.start_time) / 1e9 for event in span.events}
    assert after_s == {"scheduled": pytest.approx(2, abs=0.5), "first token": pytest.approx(3, abs=0.5)}


def test_an_error_marks_the_span(metrics: RequestMetrics, exporter: InMemorySpanExporter) -> None:
    times = metrics.begin("a", "tiny", 1, time.monotonic())
    metrics.fail(times, EngineUnavailableError("gone"))
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "engine_unavailable"


async def test_the_callers_trace_goes_on(metrics: RequestMetrics, exporter: InMemorySpanExporter) -> None:
    RequestTracer.set_parent([(b"traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01".encode())])
    metrics.finish(metrics.begin("a", "tiny", 1, time.monotonic()), "stop", time.monotonic())
    (span,) = exporter.get_finished_spans()
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID


@pytest.mark.parametrize("headers", [[], [(b"traceparent", b"nonsense")], [(b"traceparent", b"\xff")]])
async def test_headers_that_name_no_trace(
    metrics: RequestMetrics, exporter: InMemorySpanExporter, headers: list[tuple[bytes, bytes]]
) -> None:
    RequestTracer.set_parent(headers)
    metrics.finish(metrics.begin("a", "tiny", 1, time.monotonic()), "stop", time.monotonic())
    (span,) = exporter.get_finished_spans()
    assert span.parent is None


def test_nothing_is_traced_unless_bentoml_samples() -> None:
    assert bentoml_tracer() is None
