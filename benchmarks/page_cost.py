"""What an open dashboard costs the engine: rounds with and without a reader of its event stream, in turn.

    python -m benchmarks.page_cost --streams 64 --tokens 400 --rounds 6
    python -m benchmarks.page_cost --host    # the host's part of a step alone, without sockets and processes

`bentoml serve` with the simulated executor (steps of `--step-us`; `--executor torch` runs the default model instead).
The reader takes every event and draws nothing: a browser on another machine. Step times are those of the engine's own
metrics, of decode steps; CPU times are the processes' own, from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.http_path import ROOT, cpu_seconds, find, free_port, read_stream, wait_ready
from configs.loader import load_profile
from runners.execution.cost_model import CostModel
from runners.execution.simulated import SimulatedExecutor, VirtualClock
from runners.ipc import encode
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, pack_ids
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan
from runners.telemetry.step_observer import StepBatch, StepObserver

_DECODE_STEPS = re.compile(r'^wavelane_step_time_seconds_(sum|count)\{kind="decode"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Round:
    step_ms: float
    engine_us_per_step: float
    http_us_per_step: float
    events: int


async def read_telemetry(port: int, counts: list[int]) -> None:
    """Events of the page's stream, until cancelled."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /telemetry HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        while data := await reader.read(1 << 16):
            counts.append(data.count(b"event: "))
    finally:
        writer.close()


def decode_steps(port: int) -> tuple[float, float]:
    """Seconds spent in decode steps, and how many there were."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        found = dict(_DECODE_STEPS.findall(response.read().decode()))
    return float(found.get("sum", 0)), float(found.get("count", 0))


async def settled(port: int) -> tuple[float, float]:
    """The same once the beats have caught up with the end of a round."""
    await asyncio.sleep(1.6)
    return await asyncio.to_thread(decode_steps, port)


async def run_round(port: int, pids: Sequence[int], options: argparse.Namespace, model: str, readers: int) -> Round:
    counts: list[int] = []
    tasks = [asyncio.create_task(read_telemetry(port, counts)) for _ in range(readers)]
    before_s, before_count = await settled(port)
    cpu_before = [cpu_seconds(pid) for pid in pids]
    await asyncio.gather(*(read_stream(port, options.tokens, {"model": model}) for _ in range(options.streams)))
    cpu = [cpu_seconds(pid) - used for pid, used in zip(pids, cpu_before, strict=True)]
    after_s, after_count = await settled(port)
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    steps = after_count - before_count
    return Round(1e3 * (after_s - before_s) / steps, 1e6 * cpu[1] / steps, 1e6 * cpu[0] / steps, sum(counts))


def serve(options: argparse.Namespace, log: Path, port: int) -> subprocess.Popen[bytes]:
    env = {
        **os.environ,
        "WAVELANE_ENGINE__EXECUTOR": options.executor,
        "WAVELANE_ENGINE__SLOTS": str(options.streams),
        "WAVELANE_SIMULATED__STEP_US": str(options.step_us),
        "BENTOML_DO_NOT_TRACK": "True",
    }
    command = [sys.executable, "-m", "bentoml", "serve", "service:Wavelane", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def report(closed: Sequence[Round], opened: Sequence[Round]) -> None:
    print("| page | step ms: median (range) | engine CPU µs a step | HTTP process CPU µs a step | events a round |")
    print("|---|---|---|---|---|")
    for name, rounds in (("closed", closed), ("open", opened)):
        step, engine, http = (
            [getattr(item, field) for item in rounds] for field in ("step_ms", "engine_us_per_step", "http_us_per_step")
        )
        print(
            f"| {name} | {statistics.median(step):.3f} ({min(step):.3f}–{max(step):.3f}) "
            f"| {statistics.median(engine):.0f} ({min(engine):.0f}–{max(engine):.0f}) "
            f"| {statistics.median(http):.0f} ({min(http):.0f}–{max(http):.0f}) "
            f"| {statistics.median(item.events for item in rounds):.0f} |"
        )
    change = statistics.median(item.step_ms for item in opened) / statistics.median(item.step_ms for item in closed) - 1
    print(f"step time, open against closed: {100 * change:+.2f} %")


def host_part(rows: int, *, is_watched: bool | None, steps: int = 1500) -> tuple[float, float]:
    """CPU µs a step of what the loop thread does beside the device, and of what the I/O thread adds; `is_watched` None:
    without an observer. A flush every 10 steps: those of 5 ms."""
    executor = SimulatedExecutor(CostModel.constant(0.0), VirtualClock())
    limits = SchedulerLimits(max_context=8192, slots=rows)
    scheduler = Scheduler(load_profile("balanced", {}).profile, executor.capabilities, CacheManager(40_000, 16), limits)
    batches: list[StepBatch] = []
    observer = StepObserver("m", scheduler, lambda: bool(is_watched), batches.append)
    for row in range(rows):
        params = SamplingParams(max_tokens=steps + 200, temperature=0.0, ignore_eos=True)
        scheduler.add_request(AddRequest(f"r{row}", "m", pack_ids([row, 1, 2, 3]), params, 0.0), 0.0)
    plans: dict[int, StepPlan] = {}
    started = loop_ns = 0
    for number in range(steps + 100):
        if number == 100:
            started = time.thread_time_ns()
        now = number * 0.005
        plan = scheduler.schedule(now)
        if isinstance(plan, StepPlan):
            plans[plan.step_id] = plan
            executor.launch(plan)
        if scheduler.num_uncommitted > 1:
            result = executor.collect()
            step = plans.pop(result.step_id)
            if is_watched is not None:
                observer.step(step, now, now + 0.004)
                if number % 10 == 0 and observer.next_flush != math.inf:
                    observer.flush(now)
            scheduler.commit(result, (), now)
        scheduler.take_outputs()
    loop_ns = time.thread_time_ns() - started
    started = time.thread_time_ns()
    for batch in batches:
        encode(batch.report())
    return loop_ns / steps / 1000, (time.thread_time_ns() - started) / steps / 1000


def report_host(rows: int, rounds: int) -> None:
    kinds = {"no observer": None, "page closed": False, "page open": True}
    best = dict.fromkeys(kinds, (math.inf, math.inf))
    for _ in range(rounds):
        for name, is_watched in kinds.items():
            best[name] = min(best[name], host_part(rows, is_watched=is_watched))
    for name, (loop_us, io_us) in best.items():
        print(f"{rows} rows, {name}: loop thread {loop_us:.1f} µs a step, I/O thread {io_us:.1f} µs a step more")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind")
    parser.add_argument("--readers", type=int, default=1, help="pages that are open in the rounds with one")
    parser.add_argument("--executor", choices=("simulated", "torch"), default="simulated")
    parser.add_argument("--step-us", type=int, default=5_000, help="time of a simulated step")
    parser.add_argument("--host", action="store_true", help="the host's part of a step, in process, best of the rounds")
    options = parser.parse_args()
    if options.host:
        report_host(options.streams, options.rounds)
        return
    port = free_port()
    closed: list[Round] = []
    opened: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        process = serve(options, Path(folder) / "server.log", port)
        try:
            model = wait_ready(process, port)
            root = psutil.Process(process.pid)
            pids = (find(root, "_bentoml_impl.worker.service"), find(root, "runners.engine_core"))
            asyncio.run(run_round(port, pids, options, model, 0))  # first requests fill caches
            for number in range(2 * options.rounds):
                # closed, open, open, closed …: a machine that slows down meanwhile slows both
                readers = options.readers if number % 4 in (1, 2) else 0
                rounds = opened if readers else closed
                rounds.append(asyncio.run(run_round(port, pids, options, model, readers)))
        finally:
            process.terminate()
            process.wait(60)
    report(closed, opened)


if __name__ == "__main__":
    main()
