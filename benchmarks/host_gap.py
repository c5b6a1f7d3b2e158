"""Does the device wait for the host between decode steps? `python -m benchmarks.host_gap --rows 1,8,64`.

Decodes under torch's profiler and looks at the device's own record. One JSON line a width: `step_ms` from the end of a
step to the end of the next; `idle_us` the time between steps in which nothing ran, no kernel and no copy, median and
99th percentile; `idle_share` of all the time; `inside_us` the same inside a step, where one kernel hands over to the
next. A step ends with the copy of its tokens to the host. `--trace FOLDER` keeps the traces.

The profiler slows every kernel of a graph a little, so the step is longer than without it; the gaps show whether the
next step was queued in time.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import logging
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import InProcessEngine, load, make_prompts, percentile
from benchmarks.model_shapes import SHAPES
from configs.loader import load_profile
from runners.request import SamplingParams

Interval = tuple[float, float, bool]
"""Start, end, is it a copy."""


def device_intervals(trace: Path) -> tuple[list[Interval], list[float]]:
    """(what ran on the device, ends of copies to the host), both in order [µs]."""
    events = json.loads(trace.read_text())["traceEvents"]
    ran: list[Interval] = []
    read_ends = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, length = float(event["ts"]), float(event["dur"])
            ran.append((start, start + length, event["cat"] == "gpu_memcpy"))
            if "DtoH" in event["name"]:
                read_ends.append(start + length)
    return sorted(ran), sorted(read_ends)


def gaps(ran: Sequence[Interval]) -> list[Interval]:
    """Times in which nothing ran; is one beside a copy."""
    idle = []
    _, end, is_copy = ran[0]
    for start, stop, copies in ran[1:]:
        if start > end:
            idle.append((end, start, is_copy or copies))
        if stop > end:
            end, is_copy = stop, copies
    return idle


def summarize(rows: int, ran: Sequence[Interval], read_ends: Sequence[float]) -> dict[str, Any]:
    """Figures of the steps between the first read and the last one."""
    first, last = read_ends[0], read_ends[-1]
    ran = [interval for interval in ran if interval[1] >= first and interval[0] <= last]
    waits = [0.0] * (len(read_ends) - 1)
    inside = 0.0
    for start, stop, is_beside_copy in gaps(ran):
        # Between the last kernel of a step and the first of the next stand the copies of tokens and of changes.
        if is_beside_copy:
            waits[min(len(waits) - 1, max(0, bisect.bisect_right(read_ends, start) - 1))] += stop - start
        else:
            inside += stop - start
    steps = [after - before for before, after in itertools.pairwise(read_ends)]
    return {
        "rows": rows,
        "steps": len(steps),
        "step_ms": round(statistics.median(steps) / 1e3, 4),
        "idle_us": round(statistics.median(waits), 2),
        "idle_us_p99": round(percentile(waits, 99), 2),
        "idle_share": round(sum(waits) / (last - first), 5),
        "inside_us": round(inside / len(steps), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--model", help="folder or file of a model")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--gpu-fraction", type=float, default=0.5)
    parser.add_argument("--trace", type=Path, help="folder to keep the traces in")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    profile = load_profile("balanced").profile
    decoder, executor, pool = load(arguments, profile)
    engine = InProcessEngine(profile, executor, pool, min(arguments.max_context, decoder.max_context))
    engine.prepare()
    params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True, temperature=0.0)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for rows in map(int, arguments.rows.split(",")):
        prompts = [make_prompts(rows, arguments.prompt_len, decoder.config.vocab_size, seed) for seed in range(2)]
        engine.run(prompts[0], params)
        with torch.profiler.profile(activities=activities) as profiled:
            engine.run(prompts[1], params)
        with tempfile.TemporaryDirectory() as scratch:
            trace = (arguments.trace or Path(scratch)) / f"host_gap_{rows}.json"
            profiled.export_chrome_trace(str(trace))
            ran, read_ends = device_intervals(trace)
        # The prompts' own steps come first, and the last steps drain the pipeline.
        keep = len(read_ends) // 4
        print(json.dumps(summarize(rows, ran, read_ends[keep:-4])), flush=True)
    executor.close()


if __name__ == "__main__":
    main()
