"""What parts of the cuda executor bring, each off in turn, in one process: `python -m benchmarks.engine_switches`.

    whole    whole prompts attend by the vendor's kernel        graphs   passes over 1,024 tokens run from graphs
    half     prompts join a step up to half its budget          alone    lone cold starts stop waiting for company

Prints JSON lines: whether the switches change tokens (`graphs` must not; `whole` may, at near-ties), then times of each
case with everything on and with single parts off, medians of --repeat bursts. On a CPU: the `tiny` shape, to try it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from benchmarks.engine import InProcessEngine, load, make_prompts, summarize
from configs.loader import load_profile
from runners.execution import step_keys
from runners.execution.step_graphs import EagerSteps
from runners.messages import unpack_ids
from runners.request import Request, SamplingParams
from runners.scheduling import admission
from runners.scheduling.mix import MixPolicy

# (requests x prompt tokens, parts that are off) of each measurement.
CASES = (
    ("1x23", ()),
    ("1x23", ("alone",)),
    ("1x2000", ()),
    ("1x2000", ("whole",)),
    ("64x128", ()),
    ("64x128", ("half",)),
    ("64x128", ("half", "graphs")),
    ("8x2000", ()),
    ("8x2000", ("whole",)),
    ("8x2000", ("whole", "graphs")),
    ("64x2000", ()),
    ("64x2000", ("whole", "graphs")),
)
FIGURES = ("decode_ms_step", "ttft_ms_mean", "ttft_ms_min", "ttft_ms_max", "out_tok_s", "itl_ms_p99")


def pieces_of_the_whole_budget(
    self: MixPolicy, cursors: Iterable[Request], start_of: Callable[[Request], int], num_rows: int
) -> Iterator[tuple[Request, int]]:
    """Every cursor joins while the budget lasts, unless it would be split for less than a quarter of it."""
    left = self.token_budget
    for place, cursor in enumerate(cursors):
        start, total = start_of(cursor), len(cursor.token_ids)
        end = min(self.chunk.end(start, total), start + left)
        if end <= start or (place and end < total and end - start < self.token_budget // 4):
            return
        yield cursor, end
        left -= end - start


class Switches:
    """One executor; `off` takes parts away for a while."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._profile = load_profile(
            None, {"WAVELANE_PROFILE": "balanced", "WAVELANE_KV__PREFIX_CACHE": "false"}
        ).profile
        self.decoder, self.executor, self._pool = load(arguments, self._profile)
        self._max_context = min(arguments.max_context, self.decoder.max_context)
        self.engine().prepare()

    def engine(self) -> InProcessEngine:
        return InProcessEngine(self._profile, self.executor, self._pool, self._max_context)

    @contextlib.contextmanager
    def off(self, *parts: str) -> Iterator[None]:
        executor: Any = self.executor
        patches = {
            "whole": mock.patch.object(executor._program.forward, "tells_whole_prompts", False),
            "graphs": mock.patch.object(step_keys, "MAX_GRAPH_TOKENS", step_keys.MAX_TOKENS_CAPTURED_AT_ONCE),
            "half": mock.patch.object(MixPolicy, "pieces", pieces_of_the_whole_budget),
            "alone": mock.patch.object(admission, "_STARTS_ALONE", 1 << 30),
            "all graphs": mock.patch.object(executor, "_graphs", EagerSteps()),
        }
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(patches[part])
            yield

    def prompts(self, batch: int, length: int, seed: int) -> list[list[int]]:
        return make_prompts(batch, length, self.decoder.config.vocab_size, seed)

    def tokens(self, batch: int, length: int, max_tokens: int) -> list[tuple[int, ...]]:
        """Greedy tokens of each request of a burst."""
        engine = self.engine()
        found: list[list[int]] = [[] for _ in range(batch)]
        take_outputs = engine._scheduler.take_outputs

        def noted() -> Any:
            outputs = take_outputs()
            for output in outputs:
                found[int(output.request_id) - 1] += unpack_ids(output.token_ids)
            return outputs

        with mock.patch.object(engine._scheduler, "take_outputs", noted):
            engine.run(self.prompts(batch, length, 5), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))
        return [tuple(ids) for ids in found]

    def measure(self, batch: int, length: int, warmup: int, repeat: int) -> dict[str, Any]:
        """Medians of FIGURES; the median time that a launch takes the host [ms] by kind of step."""
        engine = self.engine()
        params = SamplingParams(128, temperature=0.0, ignore_eos=True)
        rows = []
        for number in range(warmup + repeat):
            if number == warmup:
                engine.steps.clear()
                rows.clear()
            gc.collect(0)
            rows.append(summarize({}, *engine.run(self.prompts(batch, length, 100 * batch + number), params)))
            if number < warmup:
                engine.prepare()
        launches = {
            kind: round(statistics.median(step["launch_ms"] for step in steps), 2)
            for kind, steps in itertools.groupby(sorted(engine.steps, key=lambda s: s["kind"]), lambda s: s["kind"])
        }
        return {name: round(statistics.median(row[name] for row in rows), 3) for name in FIGURES} | {
            "launch_ms": launches
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", default="llama-3.1-8b" if on_gpu else "tiny")
    parser.add_argument("--cases", default="1x23,1x2000,64x128,8x2000,64x2000" if on_gpu else "1x23,8x2000")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--max-context", type=int, default=8192)
    parser.add_argument("--gpu-fraction", type=float, default=0.85)
    arguments = parser.parse_args()
    arguments.model = None
    switches = Switches(arguments)
    gc.collect()
    gc.freeze()
    gc.disable()
    expected = switches.tokens(8, 700, 8)
    switches.engine().prepare()
    for parts in ((), ("all graphs",), ("whole",)):
        with switches.off(*parts):
            found = switches.tokens(8, 700, 8)
        same = sum(one == other for one, other in zip(expected, found, strict=True))
        print(json.dumps({"check": "8x700", "off": parts, "requests_with_equal_tokens": same}), flush=True)
    for case, parts in CASES:
        if case in arguments.cases.split(","):
            batch, length = map(int, case.split("x"))
            with switches.off(*parts):
                figures = switches.measure(batch, length, arguments.warmup, arguments.repeat)
            print(json.dumps({"case": case, "off": parts} | figures), flush=True)
    switches.executor.close()


if __name__ == "__main__":
    main()
