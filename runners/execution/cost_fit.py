"""Fit a cost model to measured steps.

    python -m runners.execution.cost_fit MEASUREMENTS.jsonl --output MODEL.json [--source TEXT]

Each line of the file is one step: `{"kind": "decode", "rows": 8, "context_tokens": 1520, "attention_pairs": 0,
"uneven_tokens": 80, "seconds": 0.0046}` (`rows`: decode rows at their width plus prompt tokens). A step is read once
the next one is queued: where the host took most of that time to queue it (`launch_ms` and `schedule_ms` of lines with
the same `case`), the time is the host's, and the step and the one after it are left out. Every fifth step of a kind is
held out; the error over those is printed. Least squares over relative errors, coefficients kept at zero or above; the
bend is searched among the measured row counts.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.errors import StartupError
from runners.execution.cost_model import CostModel, StepCost, StepFeatures
from runners.scheduling.scheduler_output import PlanKind

HELD_OUT_EVERY = 5
# A step counts while queueing it, and the next one, each took the host less than this share of its time.
HOST_SHARE = 0.5
_MAX_KNEES = 24
# The same kernels run them. One kind alone is often seen in few sizes, and its line would go astray elsewhere.
_WITH_PROMPTS = (PlanKind.WAVE, PlanKind.CHUNK, PlanKind.MIXED)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One step of a kind: what it carried, how long it took."""

    kind: PlanKind
    features: StepFeatures
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors over the held-out steps of one kind."""

    kind: PlanKind
    num_fitted: int
    num_held_out: int
    mean: float
    worst: float


def read_measurements(path: Path) -> list[Measurement]:
    """StartupError that names file and line when one is not a measurement."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise StartupError(f"{path}: {error}") from error
    entries: list[tuple[dict[str, Any], Measurement]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
                entries.append((entry, _measurement(entry)))
            except (ValueError, KeyError, TypeError) as error:
                raise StartupError(f"{path}:{number}: no step measurement: {error}") from error
    return _times_of_the_device(entries)


def _times_of_the_device(entries: Sequence[tuple[dict[str, Any], Measurement]]) -> list[Measurement]:
    """Those whose time is not the host's; see the module."""

    def host_s(entry: dict[str, Any]) -> float:
        return float(entry.get("launch_ms", 0.0) + entry.get("schedule_ms", 0.0)) / 1e3

    kept: list[Measurement] = []
    before: dict[str, Any] = {}
    was_late = False
    for place, (entry, measurement) in enumerate(entries):
        after = entries[place + 1][0] if place + 1 < len(entries) else {}
        host = host_s(entry)
        if after.get("case") == entry.get("case"):
            host = max(host, host_s(after))
        is_late = host > HOST_SHARE * measurement.seconds
        follows_late = was_late and before.get("case") == entry.get("case")
        if not is_late and not follows_late:
            kept.append(measurement)
        before, was_late = entry, is_late
    return kept


def _measurement(entry: dict[str, Any]) -> Measurement:
    seconds = float(entry["seconds"])
    if not seconds > 0:
        raise ValueError(f"a step of {seconds} seconds")
    counts = (entry.get(name, 0) for name in ("context_tokens", "attention_pairs", "uneven_tokens"))
    features = StepFeatures(entry["rows"], *counts)
    return Measurement(PlanKind(entry["kind"]), features, seconds)


def fit(
    measurements: Sequence[Measurement], *, source: str, overlap_slowdown: float = 1.0
) -> tuple[CostModel, list[FitError]]:
    """A cost model, and its error over the steps that it has not seen. ValueError without a decode measurement."""
    by_kind: dict[PlanKind, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_kind[measurement.kind].append(measurement)
    costs: dict[PlanKind, StepCost] = {}
    errors: list[FitError] = []
    fitted_by_kind = {
        kind: [step for place, step in enumerate(steps) if place % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
        for kind, steps in by_kind.items()
    }
    prompts = [step for kind in _WITH_PROMPTS for step in fitted_by_kind.get(kind, ())]
    common = fit_cost(prompts) if prompts else None
    for kind, steps in by_kind.items():
        held_out = steps[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        fitted = fitted_by_kind[kind]
        costs[kind] = common if common is not None and kind in _WITH_PROMPTS else fit_cost(fitted)
        relative = [abs(costs[kind].seconds(step.features) / step.seconds - 1) for step in held_out]
        if relative:
            errors.append(FitError(kind, len(fitted), len(held_out), sum(relative) / len(relative), max(relative)))
    return CostModel(costs, overlap_slowdown, source), errors


def fit_cost(steps: Sequence[Measurement]) -> StepCost:
    """The line with the smallest squared relative error over `steps` (at least one)."""
    row_counts = sorted({step.features.rows for step in steps})
    stride = max(1, len(row_counts) // _MAX_KNEES)
    best: tuple[float, StepCost] | None = None
    for knee in row_counts[::stride]:
        cost = _fit_with_knee(steps, knee)
        loss = sum((cost.seconds(step.features) / step.seconds - 1) ** 2 for step in steps)
        if best is None or loss < best[0]:
            best = loss, cost
    if best is None:
        raise ValueError("no measurement to fit a cost to")
    return best[1]


def _fit_with_knee(steps: Sequence[Measurement], knee: int) -> StepCost:
    columns = [_columns(step.features, knee) for step in steps]
    targets = [step.seconds for step in steps]
    active = [index for index in range(6) if any(row[index] for row in columns)]
    solution: dict[int, float] = {}
    while active:
        # Divided by the measured time, so that a short step counts as much as a long one.
        matrix = [[row[index] / target for index in active] for row, target in zip(columns, targets, strict=True)]
        values = _least_squares(matrix, [1.0] * len(matrix))
        solution = dict(zip(active, values, strict=True))
        worst = min(active, key=lambda index: solution[index])
        if solution[worst] >= 0:
            break
        active.remove(worst)  # a negative cost only bends the line away from what was measured
        solution = {}
    coefficients = [solution.get(index, 0.0) for index in range(6)]
    base, per_row, beyond, context, pair, uneven = coefficients
    return StepCost(base, per_row, knee, beyond, context, pair, uneven)


def _columns(features: StepFeatures, knee: int) -> tuple[float, ...]:
    below = min(features.rows, knee)
    return (
        1.0,
        below,
        features.rows - below,
        features.context_tokens,
        features.attention_pairs,
        features.uneven_tokens,
    )


def _least_squares(matrix: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """Coefficients by the normal equations, columns scaled to one; a column that others explain gets 0."""
    width = len(matrix[0])
    scales = [max(abs(row[column]) for row in matrix) or 1.0 for column in range(width)]
    scaled = [[row[column] / scales[column] for column in range(width)] for row in matrix]
    normal = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * target for row, target in zip(scaled, targets, strict=True))]
        for i in range(width)
    ]
    pivots = []
    for column in range(width):
        pivot = max((row for row in range(width) if row not in pivots), key=lambda row: abs(normal[row][column]))
        if abs(normal[pivot][column]) < 1e-9 * len(matrix):
            pivots.append(-1)
            continue
        pivots.append(pivot)
        for row in range(width):
            if row != pivot:
                factor = normal[row][column] / normal[pivot][column]
                normal[row] = [a - factor * b for a, b in zip(normal[row], normal[pivot], strict=True)]
    return [
        0.0 if pivot < 0 else normal[pivot][width] / normal[pivot][column] / scales[column]
        for column, pivot in enumerate(pivots)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--source", default="", help="what was measured: device, model, date")
    parser.add_argument("--overlap-slowdown", type=float, default=1.0, help="stretch of steps beside a flight")
    arguments = parser.parse_args()
    try:
        measurements = read_measurements(arguments.measurements)
        model, errors = fit(
            measurements,
            source=arguments.source or f"fitted to {arguments.measurements.name}",
            overlap_slowdown=arguments.overlap_slowdown,
        )
    except (StartupError, ValueError) as error:
        parser.exit(2, f"{error}\n")
    model.save(arguments.output)
    for kind in errors:
        print(
            f"{kind.kind.value:16} {kind.num_fitted:5} steps fitted, {kind.num_held_out:4} held out: "
            f"mean error {kind.mean:6.1%}, worst {kind.worst:6.1%}"
        )


if __name__ == "__main__":
    main()
