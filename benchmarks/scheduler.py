"""What a step costs the host: `schedule` + `commit` with every slot live and a long queue.

    python -m benchmarks.scheduler [--rows 64,256] [--waiting 1000]

Decode steps only, one step behind, a queue that cannot be admitted (all slots are taken). Prints one JSON line a case.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time

from configs.schema import Profile
from runners.execution.executor import Capabilities, StepResult
from runners.kv_cache.cache_manager import CacheManager
from runners.messages import AddRequest, pack_ids
from runners.request import SamplingParams
from runners.scheduling.scheduler import Scheduler, SchedulerLimits
from runners.scheduling.scheduler_output import StepPlan

PROMPT_TOKENS = 64


def measure(rows: int, waiting: int, steps: int = 2000) -> dict[str, float]:
    """Microseconds of host time a step, over `steps` decode steps of `rows` rows."""
    capabilities = Capabilities(wave=True, mix=True, overlap=False, seq=True, pipeline_depth=1)
    max_tokens = steps + 200
    cache = CacheManager((rows + 1) * (-(-(PROMPT_TOKENS + max_tokens) // 16) + 2))
    limits = SchedulerLimits(PROMPT_TOKENS + max_tokens, rows, frozenset({-1}))
    scheduler = Scheduler(Profile(), capabilities, cache, limits)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    for number in range(rows + waiting):
        prompt = pack_ids([(number * 7919 + position) % 30000 for position in range(PROMPT_TOKENS)])
        scheduler.add_request(AddRequest(f"request-{number}", "model", prompt, params, 0.0), 0.0)
    timings: list[float] = []
    in_flight: list[StepPlan] = []
    now = 1.0
    gc.collect()
    gc.disable()
    while len(timings) < steps:
        now += 0.005
        started = time.perf_counter()
        plan = scheduler.schedule(now)
        schedule_s = time.perf_counter() - started
        assert isinstance(plan, StepPlan)
        in_flight.append(plan)
        if len(in_flight) < 2:
            continue
        oldest = in_flight.pop(0)
        result = StepResult(oldest.step_id, tuple(range(100, 100 + len(oldest.sampling_request_ids))))
        started = time.perf_counter()
        scheduler.commit(result, (), now)
        scheduler.take_outputs()
        if len(oldest.decode_rows) == len(plan.decode_rows) == rows:
            timings.append(schedule_s + time.perf_counter() - started)
    gc.enable()
    timings.sort()
    return {
        "rows": rows,
        "waiting": waiting,
        "steps": steps,
        "mean_us": round(statistics.fmean(timings) * 1e6, 1),
        "p50_us": round(timings[len(timings) // 2] * 1e6, 1),
        "p99_us": round(timings[len(timings) * 99 // 100] * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,256", help="live rows, comma separated")
    parser.add_argument("--waiting", default="0,1000", help="waiting requests, comma separated")
    arguments = parser.parse_args()
    for rows in map(int, arguments.rows.split(",")):
        for waiting in map(int, arguments.waiting.split(",")):
            print(json.dumps(measure(rows, waiting)), flush=True)


if __name__ == "__main__":
    main()
