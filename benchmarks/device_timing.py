"""Times of kernels on a GPU: replays of a captured graph, so that launch overhead is that of a served step."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

# Measured on an H200: a plain streaming read, and an 8192³ bf16 product on random data.
READ_CEILING_BYTES_S = 4.41e12
PRODUCT_CEILING_FLOP_S = 790e12


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Capture the calls in order, after one eager run of each."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int = 7) -> float:
    """Median seconds of one replay, after two that warm up."""
    graph.replay()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def seconds_per_call(calls: Sequence[Callable[[], object]], replays: int = 7) -> float:
    """Median seconds of one of `calls`, which should rotate over more data than the L2 holds (60 MB)."""
    return replay_seconds(graph_of(calls), replays) / len(calls)
