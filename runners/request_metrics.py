"""What clients experience, counted where the engine's output arrives in the HTTP process."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from runners.errors import WavelaneError
from runners.histogram import Histogram, JointHistogram

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from runners.tracing import RequestTracer

TTFT_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
ITL_BOUNDS_S = (
    *(0.001, 0.0025, 0.004, 0.005, 0.006, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3),
    *(0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0),
)
LATENCY_BOUNDS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

ABORTED = "abort"


class RequestTimes:
    """One request's clock, in seconds of the monotonic clock."""

    __slots__ = ("arrived_at", "first_at", "last_at", "model", "num_generated", "num_prompt_tokens", "queue_s", "span")

    def __init__(self, arrived_at: float, num_prompt_tokens: int, model: str = "") -> None:
        self.arrived_at = arrived_at
        self.model = model
        self.num_prompt_tokens = num_prompt_tokens
        self.num_generated = 0
        self.queue_s: float | None = None
        self.first_at: float | None = None
        self.last_at = arrived_at
        self.span: Span | None = None


class ModelRequests:
    """Histograms and counters over the requests of one model."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_BOUNDS_S)
        self.inter_token_latency = Histogram(ITL_BOUNDS_S)
        self.e2e_latency = Histogram(LATENCY_BOUNDS_S)
        self.queue_time = Histogram(LATENCY_BOUNDS_S)
        self.prefill_time = Histogram(LATENCY_BOUNDS_S)
        self.decode_time = Histogram(LATENCY_BOUNDS_S)
        self.prompt_tokens = Histogram(TOKEN_BOUNDS)
        self.generation_tokens = Histogram(TOKEN_BOUNDS)
        self.finished: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()


class RequestMetrics:
    """All requests of this process by the first name of their model, and their spans where there is a `tracer`."""

    def __init__(self) -> None:
        self.tracer: RequestTracer | None = None
        self.by_model: dict[str, ModelRequests] = {}
        self.num_tokens = 0

    def of(self, model: str) -> ModelRequests:
        """Those of one model; made when there are none."""
        found = self.by_model.get(model)
        if found is None:
            found = self.by_model[model] = ModelRequests()
        return found

    @property
    def time_to_first_token(self) -> JointHistogram:
        """Of all models."""
        return JointHistogram(TTFT_BOUNDS_S, lambda: [model.time_to_first_token for model in self.by_model.values()])

    @property
    def inter_token_latency(self) -> JointHistogram:
        """Of all models."""
        return JointHistogram(ITL_BOUNDS_S, lambda: [model.inter_token_latency for model in self.by_model.values()])

    def begin(self, request_id: str, model: str, num_prompt_tokens: int, now: float) -> RequestTimes:
        """A request goes to the engine."""
        times = RequestTimes(now, num_prompt_tokens, model)
        if self.tracer is not None:
            times.span = self.tracer.begin(request_id, model, times)
        return times

    def tokens(self, times: RequestTimes, num_tokens: int, now: float) -> None:
        """New tokens arrived. The hot path: once a request and step."""
        model = self.by_model.get(times.model) or self.of(times.model)
        if times.first_at is not None:
            model.inter_token_latency.observe(now - times.last_at)
        else:
            times.first_at = now
            model.time_to_first_token.observe(now - times.arrived_at)
        times.last_at = now
        times.num_generated += num_tokens
        self.num_tokens += num_tokens

    def queued(self, times: RequestTimes, queue_s: float) -> None:
        """The engine says how long the request waited for its place."""
        times.queue_s = queue_s
        self.of(times.model).queue_time.observe(queue_s)

    def finish(self, times: RequestTimes, reason: str, now: float) -> None:
        """The request ended without a fault of ours: `stop`, `length`, or `abort` when its client left."""
        model = self.of(times.model)
        model.finished[reason] += 1
        if self.tracer is not None and times.span is not None:
            self.tracer.end(times.span, times, reason)
        if reason == ABORTED:
            return
        model.e2e_latency.observe(now - times.arrived_at)
        model.prompt_tokens.observe(times.num_prompt_tokens)
        model.generation_tokens.observe(times.num_generated)
        if times.first_at is not None:
            model.decode_time.observe(now - times.first_at)
            if times.queue_s is not None:
                model.prefill_time.observe(max(0.0, times.first_at - times.arrived_at - times.queue_s))

    def fail(self, times: RequestTimes, error: WavelaneError) -> None:
        """The request ended with an error."""
        code = error.code or error.type
        self.of(times.model).errors[code] += 1
        if self.tracer is not None and times.span is not None:
            self.tracer.end(times.span, times, code, failed=True)
