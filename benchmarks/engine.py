"""Scheduler and executor in this process, all requests of a case at once: `python -m benchmarks.engine`.

Prints one JSON line a case and repetition, with the fields of a vLLM run of the same cases: times in milliseconds from
just before the first request is added to when a token is in the hands of this process.
    ttft_ms_*       per request: its first token
    decode_ms_step  while every request decodes: milliseconds a step
    itl_ms_*        gaps between tokens of one request, all requests pooled
`--sampled` draws with temperature 0.7 and top_p 0.9; `--profile-steps FILE` writes a torch profile of one case.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import logging
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.model_shapes import SHAPES, RandomCheckpoint
from configs.loader import load_profile
from configs.schema import Profile
from runners.execution.cost_model import StepFeatures
from runners.execution.cuda_executor import CudaExecutor
from runners.execution.cuda_loading import load_cuda_executor
from runners.execution.device_streams import HostStreams
from runners.execution.executor import Executor, LaunchError
from runners.execution.step_graphs import EagerSteps
from runners.kv_cache.cache_manager import CacheManager
from runners.kv_cache.device_cache import DeviceCache
from runners.kv_cache.sizing import DeviceMemory, PoolSize, kv_block_bytes, size_pool
from runners.messages import AddRequest, OutputError, pack_ids
from runners.models.builder import build_decoder
from runners.models.decoder import Decoder
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan

Events = dict[str, list[tuple[float, int]]]


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(percent / 100 * (len(ordered) - 1))))] if ordered else math.nan


def make_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids; for the published vocabularies the same ones as the peer's run draws."""
    draw = random.Random(seed)
    low = 1000 if vocab_size > 2000 else 0
    return [[draw.randrange(low, min(vocab_size, 127000)) for _ in range(length)] for _ in range(count)]


def summarize(case: dict[str, Any], start: float, events: Events, end: float) -> dict[str, Any]:
    """`events`: (time, new tokens) of each request, in order."""
    firsts = [times[0][0] for times in events.values()]
    lasts = [times[-1][0] for times in events.values()]
    ttft = [(first - start) * 1e3 for first in firsts]
    itl = [(b - a) * 1e3 / n for times in events.values() for (a, _), (b, n) in itertools.pairwise(times)]
    window_start, window_end = max(firsts), min(lasts)
    steps, window_tokens = [], []
    for times in events.values():
        inside = [(moment, count) for moment, count in times if window_start < moment <= window_end + 1e-9]
        tokens = sum(count for _, count in inside)
        window_tokens.append(len(inside))
        if tokens:
            steps.append((inside[-1][0] - window_start) * 1e3 / tokens)
    num_tokens = sum(count for times in events.values() for _, count in times)
    summary = case | {
        "out_tokens": num_tokens,
        "wall_s": round(end - start, 5),
        "out_tok_s": round(num_tokens / (end - start), 2),
        "ttft_ms_min": round(min(ttft), 3),
        "ttft_ms_mean": round(statistics.mean(ttft), 3),
        "ttft_ms_p50": round(percentile(ttft, 50), 3),
        "ttft_ms_p90": round(percentile(ttft, 90), 3),
        "ttft_ms_max": round(max(ttft), 3),
        "decode_ms_step": round(statistics.mean(steps), 4) if steps else None,
        "decode_window_tok": round(statistics.mean(window_tokens), 1),
        "itl_ms_p50": round(percentile(itl, 50), 4),
        "itl_ms_p90": round(percentile(itl, 90), 4),
        "itl_ms_p99": round(percentile(itl, 99), 4),
    }
    if len(ttft) <= 8:
        summary["ttft_ms_each"] = [round(each, 3) for each in ttft]
    return summary


class InProcessEngine:
    """The engine loop (`runners.engine_loop`) without messages: requests go in, events come out."""

    def __init__(self, profile: Profile, executor: Executor, pool: PoolSize, max_context: int) -> None:
        cache = CacheManager(pool.num_blocks, pool.block_tokens, prefix_cache=profile.kv.prefix_cache)
        limits = SchedulerLimits(max_context=max_context, slots=profile.engine.slots)
        self._scheduler = Scheduler(profile, executor.capabilities, cache, limits)
        self._executor = executor
        self._depth = executor.capabilities.pipeline_depth
        self._num_requests = 0
        self.steps: list[dict[str, Any]] = []
        self._under_way: deque[tuple[float, dict[str, Any]]] = deque()
        self._last_read = 0.0

    def prepare(self) -> None:
        """What an engine without work does after a moment."""
        while self._executor.use_idle_time():
            pass

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[float, Events, float]:
        """(start, events, end) of a burst of requests [seconds of the performance counter]."""
        events: Events = {}
        start = time.perf_counter()
        for prompt in prompts:
            self._num_requests += 1
            now = time.monotonic()
            message = AddRequest(str(self._num_requests), "", pack_ids(prompt), params, now)
            self._scheduler.add_request(message, now)
        while self._scheduler.has_work:
            self._turn(events)
        return start, events, time.perf_counter()

    def _turn(self, events: Events) -> None:
        scheduler, executor = self._scheduler, self._executor
        began = time.perf_counter()
        plan = scheduler.schedule(time.monotonic())
        if isinstance(plan, StepPlan):
            scheduled = time.perf_counter()
            try:
                executor.launch(plan)
            except LaunchError as error:
                logging.warning("step %d: %s", plan.step_id, error)
                scheduler.launch_failed(plan, OutputError(str(error), "request_failed"), time.monotonic())
            else:
                self._launched(plan, began, scheduled)
            if scheduler.num_uncommitted > self._depth:
                self._commit()
        elif scheduler.num_uncommitted > 0:
            self._commit()
        elif scheduler.num_flights > 0:
            scheduler.commit(None, executor.completed_flights(), time.monotonic())
        now = time.perf_counter()
        for output in scheduler.take_outputs():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id}: {output.error.message}")
            if output.token_ids:
                events.setdefault(output.request_id, []).append((now, len(output.token_ids) // 4))

    def _commit(self) -> None:
        result = self._executor.collect()
        now = time.perf_counter()
        if self._under_way:
            launched, step = self._under_way.popleft()
            step["seconds"] = round(now - max(launched, self._last_read), 7)
            self.steps.append(step)
        self._last_read = now
        self._scheduler.commit(result, self._executor.completed_flights(), time.monotonic())

    def _launched(self, plan: StepPlan, began: float, scheduled: float) -> None:
        """Note a step for `runners.execution.cost_fit`, with what it cost this thread [ms]."""
        if plan.flight_id is not None:
            return
        step: dict[str, Any] = {"kind": plan.kind.value, **asdict(StepFeatures.of(plan))}
        step["schedule_ms"] = round((scheduled - began) * 1e3, 3)
        step["launch_ms"] = round((time.perf_counter() - scheduled) * 1e3, 3)
        self._under_way.append((scheduled, step))


def load(arguments: argparse.Namespace, profile: Profile) -> tuple[Decoder, Executor, PoolSize]:
    """The model of the command line and a warm executor for it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if arguments.model is not None:
        from runners.loading.checkpoint import open_checkpoint

        checkpoint: Any = open_checkpoint(Path(arguments.model))
    else:
        checkpoint = RandomCheckpoint(SHAPES[arguments.shape])
    config = checkpoint.config
    max_context = min(arguments.max_context, config.max_context)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    decoder = build_decoder(checkpoint, dtype=dtype, device=device, quantization="none", max_context=max_context)
    block_tokens = profile.kv.block_tokens
    block_bytes = kv_block_bytes(config, block_tokens, decoder.dtype.itemsize)
    sizes = {"block_bytes": block_bytes, "block_tokens": block_tokens, "max_context": max_context}
    slots = profile.engine.slots
    if device.type == "cuda":

        def size_for(memory: DeviceMemory) -> PoolSize:
            return size_pool(**sizes, memory=memory, gpu_fraction=arguments.gpu_fraction)

        step_tokens = max(profile.mix.token_budget + slots, max_context)
        executor, pool = load_cuda_executor(
            decoder, size_for, slots=slots, max_context=max_context, max_step_tokens=step_tokens
        )
        return decoder, executor, pool
    pool = size_pool(**sizes, blocks=4096)
    cache = DeviceCache(config, pool.num_blocks, block_tokens, decoder.dtype, device)
    executor = CudaExecutor(decoder, cache, HostStreams(), EagerSteps(), slots=slots, max_context=max_context)
    return decoder, executor, pool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    source.add_argument("--model", help="folder or file of a model")
    parser.add_argument("--profile", default="balanced")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--prompt-len", default="23,128,2000")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--gpu-fraction", type=float, default=0.85)
    parser.add_argument("--sampled", action="store_true")
    parser.add_argument(
        "--steps", help="write what each step carried and took, as `runners.execution.cost_fit` reads it"
    )
    parser.add_argument("--profile-steps", help="write a torch profile of one more run of the last case")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")

    profile = load_profile(arguments.profile).profile
    started = time.perf_counter()
    decoder, executor, pool = load(arguments, profile)
    loaded_s = round(time.perf_counter() - started, 2)
    print(json.dumps({"event": "engine_ready", "engine": "wavelane", "startup_s": loaded_s}), flush=True)
    engine = InProcessEngine(profile, executor, pool, min(arguments.max_context, decoder.max_context))
    drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 1} if arguments.sampled else {"temperature": 0.0}
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True, **drawn)
    started = time.perf_counter()
    engine.prepare()
    print(json.dumps({"event": "idle_work_done", "idle_s": round(time.perf_counter() - started, 2)}), flush=True)
    gc.collect()
    gc.freeze()
    gc.disable()
    for length in map(int, arguments.prompt_len.split(",")):
        for batch in map(int, arguments.batch.split(",")):
            vocab_size = decoder.config.vocab_size
            for number in range(arguments.warmup):
                seed = 10_000_000 + 1000 * batch + length + number
                engine.run(make_prompts(batch, length, vocab_size, seed), params)
                engine.prepare()
            for repetition in range(arguments.repeat):
                gc.collect(0)
                engine.steps.clear()
                seed = arguments.seed + 17 * repetition + 1000 * batch + length
                start, events, end = engine.run(make_prompts(batch, length, vocab_size, seed), params)
                case = {"engine": "wavelane", "batch": batch, "prompt_len": length, "max_tokens": arguments.max_tokens}
                if arguments.sampled:
                    case["sampled"] = True
                print(json.dumps(summarize(case | {"rep": repetition}, start, events, end)), flush=True)
                if arguments.steps:
                    with Path(arguments.steps).open("a") as file:
                        for step in engine.steps:
                            print(json.dumps({"case": f"{batch}x{length}/{repetition}", **step}), file=file)
    if arguments.profile_steps:
        with torch.profiler.profile() as trace:
            engine.run(make_prompts(batch, length, vocab_size, 77), params)
        trace.export_chrome_trace(arguments.profile_steps)
    executor.close()


if __name__ == "__main__":
    main()
