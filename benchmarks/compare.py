"""Ours and a peer in turn, one ratio table: `python -m benchmarks.compare --peer 'python3 peer.py --model DIR'`.

Each command prints one JSON line a case (`benchmarks.engine` says which fields); medians over repetitions are
compared. `--peer-env NAME=VALUE` sets a variable for the peer alone. With `--ours-file` or `--peer-file` lines of an
earlier run are read instead.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

Case = tuple[int, int]
METRICS = ("decode_ms_step", "ttft_ms_mean", "out_tok_s", "itl_ms_p99")
# (batch, prompt tokens): the bars for decode, mean TTFT, tokens a second.
BARS: dict[Case, tuple[float, float, float]] = {
    (1, 23): (0.80, 0.5, 1.2),
    (8, 23): (0.86, 0.5, 1.15),
    (64, 23): (0.88, 0.5, 1.15),
    (1, 128): (0.80, 0.7, 1.2),
    (8, 128): (0.86, 0.5, 1.15),
    (64, 128): (0.88, 0.65, 1.12),
    (1, 2000): (0.80, 1.0, 1.15),
    (8, 2000): (0.90, 0.78, 1.07),
    (64, 2000): (0.97, 0.97, 1.0),
}


def medians(lines: Iterable[str]) -> dict[Case, dict[str, float]]:
    """By case, each metric's median over its repetitions."""
    values: dict[Case, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        if not line.startswith("{"):
            continue
        record = json.loads(line)
        for metric in METRICS:
            if "batch" in record and record.get(metric) is not None:
                values[record["batch"], record["prompt_len"]][metric].append(record[metric])
    return {case: {name: statistics.median(all_) for name, all_ in found.items()} for case, found in values.items()}


def run(command: list[str], environment: dict[str, str]) -> list[str]:
    """The command's output, copied to ours as it comes. RuntimeError when it fails."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("{"):
                print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with status {process.returncode}")
    return lines


def table(ours: dict[Case, dict[str, float]], peer: dict[Case, dict[str, float]]) -> str:
    """Ours / peer = ratio for each case; a bar that is missed is marked."""
    rows = [f"{'case':>10} {'decode ms/step':>26} {'TTFT mean ms':>28} {'tok/s':>28} {'ITL p99 ms':>22}"]
    for case in sorted(ours.keys() & peer.keys(), key=lambda case: (case[1], case[0])):
        cells = []
        bars = (*BARS.get(case, (None, None, None)), None)
        for metric, bar in zip(METRICS, bars, strict=True):
            mine, theirs = ours[case].get(metric), peer[case].get(metric)
            if mine is None or theirs is None or not theirs:
                cells.append("-")
                continue
            ratio = mine / theirs
            missed = bar is not None and (ratio < bar if metric == "out_tok_s" else ratio > bar)
            mark = "" if bar is None else f" ({'MISSED ' if missed else ''}{bar})"
            cells.append(f"{mine:.2f}/{theirs:.2f}={ratio:.2f}{mark}")
        rows.append(f"{case[0]:>3} x {case[1]:<4} " + " ".join(f"{cell:>28}" for cell in cells))
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="the peer's command; cases are appended to it")
    parser.add_argument("--peer-env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--peer-file", type=Path)
    parser.add_argument("--ours-file", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--prompt-len", default="23,128,2000")
    parser.add_argument("--max-tokens", default="128")
    parser.add_argument("--repeat", default="3")
    arguments = parser.parse_args()
    cases = ["--batch", arguments.batch, "--prompt-len", arguments.prompt_len]
    cases += ["--max-tokens", arguments.max_tokens, "--repeat", arguments.repeat]
    if arguments.ours_file is not None:
        ours = arguments.ours_file.read_text().splitlines()
    else:
        ours = run([sys.executable, "-m", "benchmarks.engine", "--shape", arguments.shape, *cases], {})
    if arguments.peer_file is not None:
        peer = arguments.peer_file.read_text().splitlines()
    elif arguments.peer is not None:
        environment = dict(entry.split("=", 1) for entry in arguments.peer_env)
        peer = run([*shlex.split(arguments.peer), *cases], environment)
    else:
        parser.error("give --peer or --peer-file")
    print(table(medians(ours), medians(peer)))


if __name__ == "__main__":
    main()
