"""The engine's counters as Prometheus text, beside what BentoML measures about HTTP itself.

Values come from the last beat of the engine. Counters start again with the engine process, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import Metric

    from runners.engine_client import EngineClient

PREFIX = "wavelane_"

_GAUGES = {
    "waiting": ("requests_waiting", "Requests in the scheduler's queue."),
    "running": ("requests_running", "Requests that hold a slot."),
    "queued_tokens": ("queued_tokens", "Prompt tokens of the requests in the queue."),
    "free_blocks": ("kv_blocks_free", "KV blocks that may be allocated."),
    "total_blocks": ("kv_blocks_total", "KV blocks of the pool."),
}
_COUNTERS = {
    "steps": ("steps", "Steps launched on the device."),
    "preemptions": ("preemptions", "Requests put back into the queue because blocks ran out."),
    "evictions": ("kv_evictions", "Cached KV blocks given up for new requests."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "cached_tokens": ("cached_prompt_tokens", "Prompt tokens whose KV came from the prefix cache or a session."),
    "generation_tokens": ("generation_tokens", "Tokens generated."),
}


class EngineCollector:
    """Turns an `EngineClient` into metric families at every scrape."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        # Imported late: BentoML sets up prometheus_client's multiprocess mode before its first import.
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        client = self._client
        stats = client.stats
        for field, (name, help_text) in _GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, help_text, value=getattr(stats, field))
        for field, (name, help_text) in _COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, help_text, value=getattr(stats, field))
        yield GaugeMetricFamily(PREFIX + "engine_ready", "1 while the engine takes requests.", value=client.is_ready)
        yield GaugeMetricFamily(PREFIX + "streams_open", "Requests in flight.", value=client.num_open_streams)
        yield CounterMetricFamily(PREFIX + "engine_restarts", "Restarts of the engine process.", value=client.restarts)
        yield CounterMetricFamily(
            PREFIX + "ipc_corrupt_messages",
            "Messages of the engine that could not be decoded.",
            value=client.num_corrupt_messages,
        )
        yield CounterMetricFamily(
            PREFIX + "engine_ipc_corrupt_messages",
            "Messages to the engine that could not be decoded.",
            value=stats.corrupt_messages,
        )
        for info in client.models:
            labels = {"model": info.served_names[0], "device": info.device, "executor": info.executor}
            kv_bytes = GaugeMetricFamily(PREFIX + "kv_pool_bytes", "Size of the KV pool.", labels=list(labels))
            kv_bytes.add_metric(list(labels.values()), info.kv_bytes)
            yield kv_bytes
            used = GaugeMetricFamily(PREFIX + "kv_used_bytes", "Bytes of KV blocks in use.", labels=list(labels))
            block_bytes = info.kv_bytes / max(1, info.total_blocks)
            used.add_metric(list(labels.values()), block_bytes * (stats.total_blocks - stats.free_blocks))
            yield used


def render(client: EngineClient) -> str:
    """Prometheus text of the engine's metrics."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(client))
    return generate_latest(registry).decode()
