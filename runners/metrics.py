"""Prometheus text: what the engine counts, what clients experience, HTTP requests, and the two processes.

Names are vLLM's where the meaning is the same, with our prefix, so that a dashboard needs one replacement. Gauges and
counters come from the last beat of the engine and start again with its process; histograms are this process's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runners.histogram import Histogram, cumulative
from runners.loop_profile import STEP_BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client import Metric

    from runners.engine_client import EngineClient
    from runners.http_metrics import HttpMetrics

PREFIX = "wavelane_"

_GAUGES = {
    "waiting": ("num_requests_waiting", "Requests in the scheduler's queue."),
    "running": ("num_requests_running", "Requests that hold a slot."),
    "queued_tokens": ("queued_tokens", "Prompt tokens of the requests in the queue."),
    "free_blocks": ("kv_blocks_free", "KV blocks that may be allocated."),
    "total_blocks": ("kv_blocks_total", "KV blocks that the model may hold: its quota, or its pool."),
    "used_blocks": ("kv_blocks_used", "KV blocks that requests and sessions hold."),
}
_COUNTERS = {
    "steps": ("steps", "Steps launched on the device."),
    "preemptions": ("num_preemptions", "Requests put back into the queue because blocks ran out."),
    "evictions": ("kv_evictions", "Cached KV blocks given up for new requests."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
}
# Of every prompt token it is asked whether its KV is there already.
_PREFIX_CACHE = {
    "prompt_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache and in sessions."),
    "cached_tokens": ("prefix_cache_hits", "Prompt tokens whose KV came from there."),
}
_HISTOGRAMS = {
    "time_to_first_token": ("time_to_first_token_seconds", "From arrival to the first token."),
    "inter_token_latency": ("inter_token_latency_seconds", "Between two outputs of one request."),
    "e2e_latency": ("e2e_request_latency_seconds", "From arrival to the last token."),
    "queue_time": ("request_queue_time_seconds", "From arrival until the request got its place."),
    "prefill_time": ("request_prefill_time_seconds", "From its place to the first token."),
    "decode_time": ("request_decode_time_seconds", "From the first token to the last."),
    "prompt_tokens": ("request_prompt_tokens", "Prompt tokens of a finished request."),
    "generation_tokens": ("request_generation_tokens", "Generated tokens of a finished request."),
}


class EngineCollector:
    """Turns an `EngineClient` into metric families at every scrape."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        yield from self._engine()
        yield from self._front_end()
        yield from self._requests()
        yield from self._loop()
        yield from self._models()

    # prometheus_client is imported late: BentoML sets up its multiprocess mode before the first import.

    def _engine(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_model = self._client.model_stats
        for field, (name, help_text) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, stats in by_model.items():
                gauge.add_metric([model], getattr(stats, field))
            yield gauge
        for field, (name, help_text) in (*_COUNTERS.items(), *_PREFIX_CACHE.items()):
            counter = CounterMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, stats in by_model.items():
                counter.add_metric([model], getattr(stats, field))
            yield counter
        used = GaugeMetricFamily(
            PREFIX + "kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", labels=["model_name"]
        )
        for model, stats in by_model.items():
            used.add_metric([model], stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0)
        yield used
        yield CounterMetricFamily(
            PREFIX + "engine_ipc_corrupt_messages",
            "Messages to the engine that could not be decoded.",
            value=self._client.stats.corrupt_messages,
        )

    def _front_end(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        client = self._client
        yield GaugeMetricFamily(PREFIX + "engine_ready", "1 while the engine takes requests.", value=client.is_ready)
        yield GaugeMetricFamily(PREFIX + "streams_open", "Requests in flight.", value=client.num_open_streams)
        yield GaugeMetricFamily(PREFIX + "streams_queued", "Of these, those without a place.", value=client.num_queued)
        yield CounterMetricFamily(PREFIX + "engine_restarts", "Restarts of the engine process.", value=client.restarts)
        yield CounterMetricFamily(
            PREFIX + "ipc_corrupt_messages",
            "Messages of the engine that could not be decoded.",
            value=client.num_corrupt_messages,
        )

    def _requests(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        by_model = self._client.metrics.by_model
        for field, (name, help_text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, help_text, labels=["model_name"])
            for model, metrics in by_model.items():
                histogram: Histogram = getattr(metrics, field)
                family.add_metric([model], cumulative(histogram.bounds, histogram.counts), histogram.total)
            yield family
        ended = CounterMetricFamily(
            PREFIX + "request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        failed = CounterMetricFamily(
            PREFIX + "request_errors", "Requests that failed, by error code.", labels=["model_name", "code"]
        )
        for model, metrics in by_model.items():
            for reason in ("stop", "length", "abort"):
                ended.add_metric([model, reason], metrics.finished[reason])
            for code, count in metrics.errors.items():
                failed.add_metric([model, code], count)
        yield ended
        yield failed

    def _loop(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

        steps = HistogramMetricFamily(PREFIX + "step_time_seconds", "Time of a step by kind of plan.", labels=["kind"])
        for kind, times in self._client.times.steps.items():
            steps.add_metric([kind], cumulative(STEP_BOUNDS_S, times.counts), times.total_s)
        yield steps
        phases = CounterMetricFamily(
            PREFIX + "loop_phase_seconds", "Where the time of the engine's loop went.", labels=["phase"]
        )
        for phase, seconds in self._client.times.phases.items():
            phases.add_metric([phase], seconds)
        yield phases

    def _models(self) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        labels = ["model_name", "device", "executor"]
        pool = GaugeMetricFamily(
            PREFIX + "kv_pool_bytes", "Size of the KV pool, which models may share.", labels=labels
        )
        used = GaugeMetricFamily(PREFIX + "kv_used_bytes", "Bytes of KV blocks in use.", labels=labels)
        for info in self._client.models:
            values = [info.served_names[0], info.device, info.executor]
            stats = self._client.model_stats.get(values[0])
            pool.add_metric(values, info.kv_bytes)
            block_bytes = info.kv_bytes / max(1, info.total_blocks)
            used.add_metric(values, block_bytes * (stats.used_blocks if stats is not None else 0))
        yield pool
        yield used


class HttpCollector:
    """Turns `HttpMetrics` into metric families."""

    def __init__(self, metrics: HttpMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect(PREFIX)


def render(client: EngineClient, http: HttpMetrics | None = None, engine_pid: int | None = None) -> str:
    """Prometheus text of the whole server: the engine's metrics, those of HTTP and, on Linux, memory, time and open
    files of this process and of the engine's."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(client))
    if http is not None:
        registry.register(HttpCollector(http))
        ProcessCollector(namespace=PREFIX + "http", registry=registry)
    if engine_pid is not None:
        ProcessCollector(namespace=PREFIX + "engine", pid=lambda: engine_pid, registry=registry)
    return generate_latest(registry).decode()
