"""Try a profile without a device: the real scheduler under a virtual clock.

    python -m runners.simulate --burst 64 --prompt-tokens 23 --profile balanced --profile latency
    python -m runners.simulate --poisson 40 --requests 10000 --profile balanced --plot out.html
    python -m runners.simulate --trace arrivals.jsonl --profile ./mine.yaml --json

Prints latencies, throughput, block use and preemptions of each profile side by side. Step times come from a cost model
(`--cost-model`); the one that is shipped says whether it is an estimate or fitted to measurements.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from configs.loader import load_profile
from runners.errors import StartupError
from runners.execution.cost_model import CostModel
from runners.simulation.run import Device, simulate
from runners.simulation.summary import summarize, table
from runners.simulation.timeline import draw
from runners.simulation.trace import Arrival, Lengths, burst, poisson, read_trace

COST_MODELS = Path(__file__).parents[1] / "configs" / "cost_models"
DEFAULT_COST_MODEL = COST_MODELS / "h200-8b.json"
# One H200 with 8B weights in bf16: about 110 GB for blocks of 2 MiB.
DEFAULT_BLOCKS = 53_000


def add_device_arguments(parser: argparse.ArgumentParser) -> None:
    """What is simulated; shared with `runners.tune`."""
    parser.add_argument("--cost-model", type=Path, default=DEFAULT_COST_MODEL, help="JSON file of step times")
    parser.add_argument("--kv-blocks", type=int, default=DEFAULT_BLOCKS, help="KV blocks of the device")


def device_of(arguments: argparse.Namespace) -> Device:
    """StartupError when the cost model cannot be read."""
    if arguments.kv_blocks < 1:
        raise StartupError(f"--kv-blocks {arguments.kv_blocks}: at least one block is needed")
    return Device(CostModel.load(arguments.cost_model), arguments.kv_blocks)


def check_folders(*files: Path | None) -> None:
    """StartupError when a file could not be written after the work is done, for want of its folder."""
    for file in files:
        if file is not None and not file.parent.is_dir():
            raise StartupError(f"{file}: there is no folder {file.parent}")


def describe_costs(device: Device) -> str:
    """One line about where the step times come from."""
    model = device.cost_model
    return f"step times: {'ESTIMATE, not measured' if model.is_estimate else model.source}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except (StartupError, ValueError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runners.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="JSON lines of arrivals")
    source.add_argument("--poisson", type=float, metavar="RATE", help="requests a second, independent of one another")
    source.add_argument("--burst", type=int, metavar="N", help="N requests at once")
    parser.add_argument("--requests", type=int, default=1000, help="requests of --poisson (default 1000)")
    parser.add_argument("--prompt-tokens", type=Lengths.parse, default=Lengths(20, 2000), help="128 or 20-2000")
    parser.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(16, 256), help="128 or 16-256")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="append", help="preset or YAML file; several are compared")
    parser.add_argument("--plot", type=Path, help="timeline and latency curves, .html or .png")
    parser.add_argument("--window", metavar="START,END", help="seconds of the timeline to draw")
    parser.add_argument("--json", action="store_true", help="one JSON line a profile in place of the table")
    add_device_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    device = device_of(arguments)
    check_folders(arguments.plot)
    arrivals, what = _arrivals(arguments)
    window = _window(arguments.window)
    simulations = []
    for name in arguments.profile or ["balanced"]:
        profile = load_profile(name, has_gpu=True).profile
        label = Path(name).stem if name.endswith((".yaml", ".yml")) else name
        simulations.append(simulate(arrivals, profile, device, name=label, keep_steps=arguments.plot is not None))
    summaries = [summarize(simulation) for simulation in simulations]
    for simulation in simulations:
        for notice in simulation.notices:
            print(f"{simulation.profile_name}: {notice}", file=sys.stderr)
    if arguments.json:
        for summary in summaries:
            print(json.dumps(summary.to_dict()))
    else:
        print(f"{what}; {describe_costs(device)}\n\n{table(summaries)}")
    if arguments.plot is not None:
        subtitle = f"{what}; {describe_costs(device)}"
        draw(simulations, subtitle=subtitle, window=window).save(arguments.plot, table(summaries))


def _arrivals(arguments: argparse.Namespace) -> tuple[list[Arrival], str]:
    """The trace, and what it is in words."""
    prompt, output = arguments.prompt_tokens, arguments.output_tokens
    lengths = f"prompts of {prompt} tokens, outputs of {output}"
    if arguments.trace is not None:
        arrivals = read_trace(arguments.trace)
        what = f"{len(arrivals)} requests of {arguments.trace.name}"
    elif arguments.burst is not None:
        arrivals = burst(arguments.burst, prompt, output, arguments.seed)
        what = f"{len(arrivals)} requests at once, {lengths}"
    else:
        if not 0 < arguments.poisson < math.inf:
            raise StartupError(f"--poisson {arguments.poisson}: a rate above zero is needed")
        arrivals = poisson(arguments.poisson, arguments.requests, prompt, output, arguments.seed)
        what = f"{len(arrivals)} requests, {arguments.poisson:g} a second, {lengths}"
    if not arrivals:
        raise StartupError("the trace holds no request")
    return arrivals, what


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, end = (float(part) for part in text.split(","))
    except ValueError:
        start = end = 0.0
    if not start < end:
        raise StartupError(f"--window {text}: write START,END in seconds, such as 0,1.5")
    return start, end


if __name__ == "__main__":
    sys.exit(main())
