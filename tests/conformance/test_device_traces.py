"""Random traces under random policies on the executor that runs ahead: on a GPU for minutes, on a CPU for a few.

`WAVELANE_TEST_TRACE_S` is how long the test on the GPU goes on (10 s by default), `WAVELANE_TEST_TRACE_SEED` where it
begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from runners.execution.cuda_executor import CudaExecutor
from runners.execution.device_streams import CudaStreams, HostStreams
from runners.execution.executor import Executor
from runners.execution.step_graphs import CapturedSteps, EagerSteps
from runners.kv_cache.device_cache import DeviceCache
from runners.loading.checkpoint import open_checkpoint
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from tests.support.device_traces import TraceReport, run_trace
from tests.support.memory_checkpoint import random_checkpoint, small_config
from tests.support.tiny_models import tiny_model

SECONDS = float(os.environ.get("WAVELANE_TEST_TRACE_S", "10"))
FIRST_SEED = int(os.environ.get("WAVELANE_TEST_TRACE_SEED", "1"))


def executors(decoder: Decoder) -> Callable[[int, int], Executor]:
    device = decoder.device
    on_gpu = device.type == "cuda"

    def make(slots: int, blocks: int) -> Executor:
        cache = DeviceCache(decoder.config, blocks, 16, decoder.dtype, device)
        streams = CudaStreams(device) if on_gpu else HostStreams(device)
        graphs = CapturedSteps(device) if on_gpu else EagerSteps()
        return CudaExecutor(decoder, cache, streams, graphs, slots=slots, max_context=decoder.max_context)

    return make


def check(reports: list[TraceReport]) -> None:
    mismatches = [mismatch for report in reports for mismatch in report.mismatches]
    num_tokens = sum(report.num_tokens for report in reports)
    shortfalls = [each for report in reports for each in report.shortfalls]
    print(
        f"{len(reports)} traces, {sum(report.num_requests for report in reports)} requests, "
        f"{sum(report.num_aborted for report in reports)} aborted, {sum(report.preemptions for report in reports)} "
        f"preemptions, {sum(report.num_cached for report in reports)} tokens from the prefix cache, "
        f"{num_tokens} tokens: {len(shortfalls)} near-ties chosen otherwise, "
        f"the widest {max(shortfalls, default=0):.3f}, "
        f"kinds {sorted(set().union(*(report.kinds for report in reports)))}"
    )
    assert mismatches == []
    assert len(shortfalls) < 0.05 * num_tokens


@pytest.mark.parametrize("seed", range(4))
def test_traces_on_the_host(seed: int) -> None:
    decoder = build_decoder(random_checkpoint(small_config()), dtype="float32")
    report = run_trace(decoder, executors(decoder), seed, num_requests=16)
    check([report])


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
def test_traces_on_the_gpu(family: str, tmp_path: Path) -> None:
    if family == "llama":
        decoder = build_decoder(random_checkpoint(small_config()), dtype="bfloat16", device="cuda", quantization="none")
    else:
        tiny_model(family).save_pretrained(tmp_path)
        decoder = build_decoder(open_checkpoint(tmp_path), dtype="bfloat16", device="cuda", quantization="none")
    reports: list[TraceReport] = []
    end, seed = time.monotonic() + SECONDS / 3, FIRST_SEED
    while not reports or time.monotonic() < end:
        reports.append(run_trace(decoder, executors(decoder), seed))
        seed += 1
        torch.cuda.empty_cache()
    check(reports)
