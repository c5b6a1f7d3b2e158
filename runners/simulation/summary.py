"""A simulation in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from runners.simulation.run import RequestRecord, Simulation


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """The value that `fraction` of the sorted values do not exceed (nearest rank); 0 of nothing."""
    if not ordered:
        return 0.0
    rank = -(-len(ordered) * fraction // 1)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Distribution:
        ordered = sorted(1000 * value for value in seconds)
        if not ordered:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        return cls(
            sum(ordered) / len(ordered),
            percentile(ordered, 0.5),
            percentile(ordered, 0.9),
            percentile(ordered, 0.99),
            ordered[-1],
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies in milliseconds; times in seconds; `busy` and the block shares are fractions."""

    profile: str
    requests: int
    failed: int
    duration_s: float
    output_tokens: int
    output_tokens_per_s: float
    requests_per_s: float
    ttft: Distribution
    itl: Distribution
    e2e: Distribution
    busy: float
    mean_blocks: float
    max_blocks: float
    preemptions: int
    cached_tokens: int
    steps: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def first_token_s(record: RequestRecord) -> float | None:
    """Time to first token; None for a request that got none."""
    return None if record.first_token_at is None else record.first_token_at - record.arrived_at


def summarize(simulation: Simulation) -> Summary:
    """Over the whole trace, from the first arrival to the last token."""
    records = simulation.requests
    start = min((record.arrived_at for record in records), default=0.0)
    end = max((record.last_token_at for record in records if record.last_token_at is not None), default=start)
    duration_s = max(end - start, 1e-9)
    tokens = sum(record.output_tokens for record in records)
    served = [record for record in records if record.error is None]
    blocks = max(1, simulation.total_blocks)
    return Summary(
        profile=simulation.profile_name,
        requests=len(records),
        failed=len(records) - len(served),
        duration_s=duration_s,
        output_tokens=tokens,
        output_tokens_per_s=tokens / duration_s,
        requests_per_s=len(served) / duration_s,
        ttft=Distribution.of(value for record in records if (value := first_token_s(record)) is not None),
        itl=Distribution.of(simulation.inter_token_s),
        e2e=Distribution.of(
            record.last_token_at - record.arrived_at for record in records if record.last_token_at is not None
        ),
        busy=simulation.busy_s / duration_s,
        mean_blocks=simulation.block_seconds / max(simulation.busy_s, 1e-9) / blocks,
        max_blocks=simulation.max_blocks / blocks,
        preemptions=simulation.preemptions,
        cached_tokens=sum(record.cached_tokens for record in records),
        steps=dict(sorted(simulation.step_kinds.items())),
    )


_KINDS = ("wave", "chunk", "mixed", "overlap_prefill", "decode", "sequential")


def table(summaries: Sequence[Summary]) -> str:
    """One column a profile."""
    rows: list[tuple[str, list[str]]] = [("", [summary.profile for summary in summaries])]

    def row(label: str, values: Iterable[str]) -> None:
        rows.append((label, list(values)))

    row("requests (failed)", (f"{s.requests} ({s.failed})" for s in summaries))
    row("duration s", (f"{s.duration_s:.2f}" for s in summaries))
    row("output tokens/s", (f"{s.output_tokens_per_s:.0f}" for s in summaries))
    row("requests/s", (f"{s.requests_per_s:.2f}" for s in summaries))
    for label, name in (("TTFT", "ttft"), ("ITL", "itl"), ("end to end", "e2e")):
        for part in ("mean", "p50", "p90", "p99", "max"):
            row(f"{label} {part} ms", (f"{getattr(getattr(s, name), part):.1f}" for s in summaries))
    row("device busy", (f"{s.busy:.0%}" for s in summaries))
    row("KV blocks mean / max", (f"{s.mean_blocks:.0%} / {s.max_blocks:.0%}" for s in summaries))
    row("preemptions", (str(s.preemptions) for s in summaries))
    row("cached prompt tokens", (str(s.cached_tokens) for s in summaries))
    for kind in _KINDS:
        if any(kind in s.steps for s in summaries):
            row(f"{kind} steps", (str(s.steps.get(kind, 0)) for s in summaries))
    widths = [max(len(values[column]) for _, values in rows) for column in range(len(summaries))]
    first = max(len(label) for label, _ in rows)
    return "\n".join(
        f"{label:<{first}}  " + "  ".join(f"{value:>{width}}" for value, width in zip(values, widths, strict=True))
        for label, values in rows
    )
