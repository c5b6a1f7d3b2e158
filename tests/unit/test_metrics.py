"""Engine counters as Prometheus text, read back with the official parser."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from runners.engine_client import EngineClient
from runners.messages import EngineStats
from runners.metrics import render
from tests.unit.test_start_report import INFO


def samples(client: EngineClient) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(render(client))
        for sample in family.samples
    }


async def test_every_counter_of_the_engine_is_there() -> None:
    client = EngineClient(slots=4, max_queued_requests=4, beat_limit_s=5.0)
    client.stats = EngineStats(*range(1, 1 + len(EngineStats.__struct_fields__)))
    client.models = [INFO]
    client.restarts = 3
    found = samples(client)
    stats = client.stats
    assert found["wavelane_requests_waiting"] == stats.waiting
    assert found["wavelane_requests_running"] == stats.running
    assert found["wavelane_kv_blocks_free"] == stats.free_blocks
    assert found["wavelane_kv_blocks_total"] == stats.total_blocks
    assert found["wavelane_generation_tokens_total"] == stats.generation_tokens
    assert found["wavelane_engine_ipc_corrupt_messages_total"] == stats.corrupt_messages
    assert found["wavelane_engine_restarts_total"] == 3
    assert found["wavelane_engine_ready"] == 0
    assert found["wavelane_kv_pool_bytes"] == INFO.kv_bytes
    values = set(found.values())
    assert all(getattr(stats, field) in values for field in EngineStats.__struct_fields__)
    await asyncio.sleep(0)


def test_a_model_that_has_not_loaded_has_no_pool() -> None:
    assert "wavelane_kv_pool_bytes" not in samples(EngineClient(slots=4, max_queued_requests=4, beat_limit_s=5.0))
