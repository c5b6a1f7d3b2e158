"""Counters and histograms as Prometheus text, read back with the official parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from runners.engine_client import EngineClient
from runners.errors import EngineUnavailableError
from runners.histogram import Histogram
from runners.loop_profile import STEP_BOUNDS_S, LoopProfile
from runners.messages import EngineStats
from runners.metrics import render
from runners.request_metrics import RequestMetrics, RequestTimes
from tests.unit.test_start_report import INFO


def client_of(metrics: RequestMetrics | None = None) -> EngineClient:
    client = EngineClient(slots=4, max_queued_requests=4, beat_limit_s=5.0)
    if metrics is not None:
        client.metrics = metrics
    return client


def samples(client: EngineClient) -> dict[str, float]:
    """By name, with the one label that tells samples of a family apart."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(render(client)):
        for sample in family.samples:
            labels = [sample.labels.get(name) for name in ("finished_reason", "code", "phase", "kind", "le")]
            found[":".join(filter(None, (sample.name, *labels)))] = sample.value
    return found


def test_every_counter_of_the_engine_is_there() -> None:
    client = client_of()
    client.stats = EngineStats(*range(1, 1 + len(EngineStats.__struct_fields__)))
    client.model_stats = {INFO.served_names[0]: client.stats}
    client.models = [INFO]
    client.restarts = 3
    found = samples(client)
    stats = client.stats
    assert found["wavelane_num_requests_waiting"] == stats.waiting
    assert found["wavelane_num_requests_running"] == stats.running
    assert found["wavelane_kv_blocks_free"] == stats.free_blocks
    assert found["wavelane_kv_blocks_total"] == stats.total_blocks
    assert found["wavelane_kv_cache_usage_perc"] == stats.used_blocks / stats.total_blocks
    assert found["wavelane_num_preemptions_total"] == stats.preemptions
    assert found["wavelane_prompt_tokens_total"] == stats.prompt_tokens
    assert found["wavelane_prefix_cache_queries_total"] == stats.prompt_tokens
    assert found["wavelane_prefix_cache_hits_total"] == stats.cached_tokens
    assert found["wavelane_generation_tokens_total"] == stats.generation_tokens
    assert found["wavelane_engine_ipc_corrupt_messages_total"] == stats.corrupt_messages
    assert found["wavelane_engine_restarts_total"] == 3
    assert found["wavelane_engine_ready"] == 0
    assert found["wavelane_kv_pool_bytes"] == INFO.kv_bytes
    values = set(found.values())
    assert all(getattr(stats, field) in values for field in EngineStats.__struct_fields__)


def test_a_model_that_has_not_loaded_has_no_pool() -> None:
    found = samples(client_of())
    assert "wavelane_kv_pool_bytes" not in found
    assert "wavelane_kv_cache_usage_perc" not in found


def test_what_the_engine_counts_is_labelled_by_model() -> None:
    client = client_of()
    client.model_stats = {"a": EngineStats(running=3, total_blocks=8, used_blocks=2), "b": EngineStats(running=5)}
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(render(client)):
        for sample in family.samples:
            found[sample.name, sample.labels.get("model_name", "")] = sample.value
    assert (found["wavelane_num_requests_running", "a"], found["wavelane_num_requests_running", "b"]) == (3, 5)
    assert (found["wavelane_kv_cache_usage_perc", "a"], found["wavelane_kv_cache_usage_perc", "b"]) == (0.25, 0)


def test_the_times_of_a_request() -> None:
    metrics = RequestMetrics()
    times = RequestTimes(100.0, num_prompt_tokens=7)
    metrics.queued(times, 0.125)
    metrics.tokens(times, 1, 100.5)
    metrics.tokens(times, 1, 100.75)
    metrics.tokens(times, 3, 101.5)
    metrics.finish(times, "length", 101.5)
    found = samples(client_of(metrics))
    for name, total, count in (
        ("time_to_first_token_seconds", 0.5, 1),
        ("inter_token_latency_seconds", 1.0, 2),
        ("e2e_request_latency_seconds", 1.5, 1),
        ("request_queue_time_seconds", 0.125, 1),
        ("request_prefill_time_seconds", 0.375, 1),
        ("request_decode_time_seconds", 1.0, 1),
        ("request_prompt_tokens", 7, 1),
        ("request_generation_tokens", 5, 1),
    ):
        assert found[f"wavelane_{name}_sum"] == total, name
        assert found[f"wavelane_{name}_count"] == count, name
        assert found[f"wavelane_{name}_bucket:+Inf"] == count, name
    assert found["wavelane_inter_token_latency_seconds_bucket:0.2"] == 0
    assert found["wavelane_inter_token_latency_seconds_bucket:0.3"] == 1
    assert found["wavelane_request_success_total:length"] == 1
    assert found["wavelane_request_success_total:stop"] == 0


def test_requests_that_ended_otherwise() -> None:
    metrics = RequestMetrics()
    metrics.finish(RequestTimes(0.0, 1), "abort", 5.0)
    metrics.fail(RequestTimes(0.0, 1), EngineUnavailableError("gone"))
    found = samples(client_of(metrics))
    assert found["wavelane_request_success_total:abort"] == 1
    assert found["wavelane_request_errors_total:engine_unavailable"] == 1
    assert found["wavelane_e2e_request_latency_seconds_count"] == 0


def test_requests_are_counted_by_model() -> None:
    metrics = RequestMetrics()
    for model, first_at in (("a", 0.5), ("b", 1.5), ("b", 2.5)):
        times = RequestTimes(0.0, 1, model)
        metrics.tokens(times, 1, first_at)
        metrics.finish(times, "stop", first_at)
    text = render(client_of(metrics))
    assert 'wavelane_time_to_first_token_seconds_sum{model_name="a"} 0.5' in text
    assert 'wavelane_time_to_first_token_seconds_sum{model_name="b"} 4.0' in text
    assert 'wavelane_request_success_total{finished_reason="stop",model_name="b"} 2.0' in text
    assert sum(metrics.time_to_first_token.counts) == 3


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 7.5


def test_step_times_by_kind_and_phases_in_whole_rounds() -> None:
    profile = LoopProfile(phase_steps=2)
    profile.mark("schedule")
    profile.step("decode", launched_at=10.0, now=10.25)
    assert profile.snapshot().phases == {}
    profile.mark("collect")
    profile.step("decode", launched_at=10.1, now=10.5)  # launched ahead: it began when the first one ended
    profile.step("wave", launched_at=20.0, now=21.0)
    client = client_of()
    client.times = profile.snapshot()
    found = samples(client)
    assert found["wavelane_step_time_seconds_sum:decode"] == 0.5
    assert found["wavelane_step_time_seconds_count:decode"] == 2
    assert found["wavelane_step_time_seconds_count:wave"] == 1
    assert found["wavelane_loop_phase_seconds_total:schedule"] >= 0
    assert found["wavelane_loop_phase_seconds_total:collect"] >= 0
    assert len(client.times.steps["decode"].counts) == len(STEP_BOUNDS_S) + 1


def test_phases_can_be_left_out() -> None:
    profile = LoopProfile(phase_steps=0)
    profile.mark("schedule")
    profile.step("decode", 0.0, 1.0)
    assert profile.snapshot().phases == {}
    assert profile.snapshot().steps["decode"].total_s == 1.0
