"""Find a profile for a load, by simulation.

    python -m runners.tune --trace arrivals.jsonl --slo ttft_p99_ms=200,itl_p99_ms=20 --plot front.html
    python -m runners.tune --trace bursty-chat --slo ttft_p99_ms=300

The trace is split: the search sees the earlier half only, and what it finds is compared with the base profile on the
later half. Writes a profile with its predicted figures on top; its predictions are as good as the cost model.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from configs.loader import load_profile, preset_names
from runners.errors import StartupError
from runners.simulate import add_device_arguments, check_folders, describe_costs, device_of
from runners.simulation.front import draw_front
from runners.simulation.named_traces import NAMED_TRACES
from runners.simulation.run import simulate
from runners.simulation.search import Candidate, Evaluation, Slo, Trials, apply, search, simplify
from runners.simulation.summary import Distribution, Summary, summarize, table
from runners.simulation.trace import Arrival, read_trace, split


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status."""
    arguments = _parser().parse_args(argv)
    try:
        _run(arguments)
    except (StartupError, ValueError, OSError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runners.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True, help=f"JSON lines of arrivals, or one of {', '.join(NAMED_TRACES)}")
    parser.add_argument("--slo", type=Slo.parse, required=True, help="such as ttft_p99_ms=200,itl_p99_ms=20")
    parser.add_argument("--base", default="balanced", help="preset to start from and to beat (default balanced)")
    parser.add_argument("--output", type=Path, default=Path("tuned.yaml"), help="profile to write (default tuned.yaml)")
    parser.add_argument("--plot", type=Path, help="Pareto front, .html or .png")
    parser.add_argument("--evaluations", type=int, default=160, help="profiles to try (default 160)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one a core)")
    add_device_arguments(parser)
    return parser


def _run(arguments: argparse.Namespace) -> None:
    device = device_of(arguments)
    check_folders(arguments.output, arguments.plot)
    train, held_out = _halves(arguments.trace)
    if arguments.base not in preset_names():
        raise StartupError(f"--base {arguments.base}: there are {', '.join(preset_names())}")
    base = load_profile(arguments.base, {}).profile
    starts = [load_profile(name, {}).profile for name in preset_names() if name != arguments.base]
    found: list[Evaluation] = []
    trials = Trials(train, base, device, arguments.slo)
    for evaluation in search(
        trials, starts=starts, evaluations=arguments.evaluations, seed=arguments.seed, workers=arguments.workers
    ):
        found.append(evaluation)
        _progress(len(found), arguments.evaluations, min(e.score for e in found))
    chosen = simplify(found, trials)
    before = summarize(simulate(held_out, base, device, name=arguments.base))
    after = summarize(simulate(held_out, apply(base, chosen.candidate), device, name="tuned"))
    what = f"{arguments.trace}: {len(train)} requests to search on, {len(held_out)} held out; {describe_costs(device)}"
    report = f"{what}\nheld-out half:\n\n{table([before, after])}\n\nchanged: {_changes(chosen.candidate)}"
    print(report)
    arguments.output.write_text(profile_yaml(arguments.base, chosen.candidate, arguments.slo, what, before, after))
    print(f"\nwritten to {arguments.output}")
    if arguments.plot is not None:
        title = f"Tuning {Path(arguments.trace).stem} for {arguments.slo}"
        draw_front(found, chosen, arguments.slo, title=title, subtitle=what).save(arguments.plot, report)


def _halves(trace: str) -> tuple[list[Arrival], list[Arrival]]:
    arrivals = NAMED_TRACES[trace]() if trace in NAMED_TRACES else read_trace(Path(trace))
    if len(arrivals) < 4:
        raise StartupError(
            f"{trace}: {len(arrivals)} requests are too few to search on one half and check on the other"
        )
    return split(arrivals)


def _progress(done: int, total: int, best: float) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{done}/{total} profiles tried, best score {best:.3f} ", end=end, file=sys.stderr, flush=True)


def _changes(candidate: Candidate) -> str:
    return ", ".join(f"{field}={value}" for field, value in candidate) or "nothing: the base profile is the best found"


def profile_yaml(base: str, candidate: Candidate, slo: Slo, what: str, before: Summary, after: Summary) -> str:
    """The profile as a file: what differs from its preset, under the figures predicted for the held-out half."""
    lines = [
        f"# Found by runners.tune for {slo}",
        f"# {what}",
        f"# Predicted on the held-out half, {base} -> this profile:",
        f"#   TTFT p50 / p99 ms: {_pair(before.ttft)} -> {_pair(after.ttft)}",
        f"#   ITL p50 / p99 ms: {_pair(before.itl)} -> {_pair(after.itl)}",
        f"#   output tokens/s: {before.output_tokens_per_s:.0f} -> {after.output_tokens_per_s:.0f}",
    ]
    content: dict[str, Any] = {"preset": base}
    for field, value in candidate:
        section, name = field.split(".")
        content.setdefault(section, {})[name] = value
    return "\n".join(lines) + "\n" + yaml.safe_dump(content, sort_keys=False)


def _pair(distribution: Distribution) -> str:
    return f"{distribution.p50:.1f} / {distribution.p99:.1f}"


if __name__ == "__main__":
    sys.exit(main())
