"""How long a step takes: per plan kind, a line with one bend over what the step carries.

    seconds = base + per_row · min(n, knee) + per_row_beyond · max(0, n - knee)
                   + per_context_token · context + per_uneven_token · uneven + per_pair · pairs

`n` rows go through the weights: decode rows (their width) and prompt tokens together. Up to the knee reading the
weights bounds the step, beyond it the arithmetic does. `context` KV tokens are read by decode rows; `uneven` more
would be if every row were as long as the longest, for which they wait; `pairs` are the query-key pairs of the chunks'
causal attention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from runners.errors import StartupError
from runners.scheduling.scheduler_output import PlanKind, StepPlan


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """What a step carries; see the module."""

    rows: int
    context_tokens: int
    attention_pairs: int
    uneven_tokens: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> StepFeatures:
        pairs = tokens = 0
        for chunk in plan.chunks:
            count = len(chunk.token_ids)
            tokens += count
            pairs += count * chunk.start + count * (count + 1) // 2
        rows = plan.decode_rows
        positions = [row.position for row in rows]
        context = sum(positions) + len(rows)
        uneven = len(rows) * (max(positions) + 1) - context if rows else 0
        return cls(max(plan.width, len(rows)) + tokens, context, pairs, uneven)


@dataclass(frozen=True, slots=True)
class StepCost:
    """The line of one plan kind. Seconds, rows, tokens."""

    base_s: float
    per_row_s: float = 0.0
    knee_rows: int = 0
    per_row_beyond_s: float = 0.0
    per_context_token_s: float = 0.0
    per_pair_s: float = 0.0
    per_uneven_token_s: float = 0.0

    def seconds(self, features: StepFeatures) -> float:
        below = min(features.rows, self.knee_rows)
        return (
            self.base_s
            + self.per_row_s * below
            + self.per_row_beyond_s * (features.rows - below)
            + self.per_context_token_s * features.context_tokens
            + self.per_uneven_token_s * features.uneven_tokens
            + self.per_pair_s * features.attention_pairs
        )


# A kind that was not measured costs what the kind after it costs.
_STANDS_IN = {
    PlanKind.SEQUENTIAL: PlanKind.DECODE,
    PlanKind.OVERLAP_PREFILL: PlanKind.CHUNK,
    PlanKind.CHUNK: PlanKind.WAVE,
    PlanKind.EMBED: PlanKind.WAVE,
    PlanKind.WAVE: PlanKind.MIXED,
    PlanKind.MIXED: PlanKind.DECODE,
}


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs by plan kind. `overlap_slowdown` stretches a flight, and every step that runs beside one.

    `source` says what the figures come from; `is_estimate` is true while they come from no measurement of this engine.
    """

    costs: Mapping[PlanKind, StepCost]
    overlap_slowdown: float = 1.0
    source: str = ""
    is_estimate: bool = False
    _resolved: dict[PlanKind, StepCost] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if PlanKind.DECODE not in self.costs:
            raise ValueError("a cost model needs at least the cost of a decode step")

    def cost(self, kind: PlanKind) -> StepCost:
        """The cost of this kind, or of the nearest kind that was measured."""
        found = self._resolved.get(kind)
        if found is None:
            measured = kind
            while measured not in self.costs:
                measured = _STANDS_IN[measured]
            found = self._resolved[kind] = self.costs[measured]
        return found

    def step_s(self, plan: StepPlan) -> float:
        """Seconds that the device needs for `plan`."""
        return self.cost(plan.kind).seconds(StepFeatures.of(plan))

    @classmethod
    def constant(cls, step_s: float) -> CostModel:
        """Every step takes the same time."""
        return cls({PlanKind.DECODE: StepCost(step_s)}, source="constant")

    @classmethod
    def load(cls, path: Path) -> CostModel:
        """Read the JSON that `save` writes. StartupError that names the file and what is wrong with it."""
        try:
            document = json.loads(path.read_text())
            costs = {PlanKind(kind): StepCost(**cost) for kind, cost in document["costs"].items()}
            return cls(costs, document["overlap_slowdown"], document["source"], document["is_estimate"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{path}: no cost model: {error}") from error

    def save(self, path: Path) -> None:
        document = {
            "source": self.source,
            "is_estimate": self.is_estimate,
            "overlap_slowdown": self.overlap_slowdown,
            "costs": {kind.value: asdict(cost) for kind, cost in self.costs.items()},
        }
        path.write_text(json.dumps(document, indent=2) + "\n")
