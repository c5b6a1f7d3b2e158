"""One load point of one server in numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.load.records import Record


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest values; None of nothing."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must meet to count as served well, in milliseconds; None: not asked for."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    """Mean time per output token after the first."""
    itl_p99_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft_ms=200,tpot_ms=20`. ValueError names what is wrong."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if name not in cls.__slots__ or not equals:
                raise ValueError(f"{part!r} is no bound: write one of {', '.join(cls.__slots__)}, = and milliseconds")
            bounds[name] = float(value)
        return cls(**bounds)

    def is_met(self, record: Record) -> bool:
        if not record.ok:
            return False
        itl_p99_s = percentile(sorted(record.gaps_s), 99) or 0.0
        values_s = (record.ttft_s, record.tpot_s, itl_p99_s, record.e2e_s)
        bounds_ms = (self.ttft_ms, self.tpot_ms, self.itl_p99_ms, self.e2e_ms)
        return all(bound is None or 1000 * value <= bound for value, bound in zip(values_s, bounds_ms, strict=True))


@dataclass(frozen=True, slots=True)
class Case:
    """One server at one load. `client_cpu` is this tool's CPU time over wall time: near 1 it is the bottleneck."""

    server: str
    pattern: str
    load: float
    """Concurrency or burst size, or requests a second; the trace's speed."""
    wall_s: float
    client_cpu: float
    records: list[Record] = field(repr=False)
    slo: Slo | None = None

    @property
    def good(self) -> list[Record]:
        return [record for record in self.records if record.ok]

    def ttft_ms(self) -> list[float]:
        return sorted(1000 * record.ttft_s for record in self.good)

    def itl_ms(self) -> list[float]:
        return sorted(1000 * gap for record in self.good for gap in record.gaps_s)

    def to_json(self) -> dict[str, Any]:
        """Milliseconds, seconds and counts, rounded."""
        good = self.good
        ttft, itl = self.ttft_ms(), self.itl_ms()
        tpot = sorted(1000 * record.tpot_s for record in good if record.output_tokens > 1)
        e2e = sorted(1000 * record.e2e_s for record in good)
        tokens = sum(record.output_tokens for record in good)
        events = sum(len(record.token_at_s) for record in good)
        fields: dict[str, Any] = {
            "server": self.server,
            "pattern": self.pattern,
            "load": self.load,
            "requests": len(self.records),
            "ok": len(good),
            "failed": len(self.records) - len(good),
            "prompt_tokens": sum(record.prompt_tokens for record in good),
            "output_tokens": tokens,
            "tokens_per_event": _round(tokens / events if events else None),
            "short_answers": sum(record.output_tokens < record.request.output_tokens for record in good),
            "wall_s": _round(self.wall_s),
            "output_tok_s": _round(tokens / self.wall_s),
            "req_s": _round(len(good) / self.wall_s),
        }
        for name, values in (("ttft_ms", ttft), ("itl_ms", itl), ("tpot_ms", tpot), ("e2e_ms", e2e)):
            fields[f"{name}_mean"] = _round(sum(values) / len(values) if values else None)
            fields |= {f"{name}_p{percent}": _round(percentile(values, percent)) for percent in (50, 90, 99)}
            fields[f"{name}_max"] = _round(values[-1] if values else None)
        if self.slo is not None:
            met = sum(self.slo.is_met(record) for record in self.records)
            fields["slo_met"] = _round(met / len(self.records) if self.records else None)
            fields["goodput_req_s"] = _round(met / self.wall_s)
        fields["late_ms_max"] = _round(1000 * max((record.late_s for record in self.records), default=0.0))
        fields["client_cpu"] = _round(self.client_cpu)
        errors = Counter(record.error for record in self.records if record.error is not None)
        if errors:
            fields["errors"] = dict(errors.most_common(5))
        return fields


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
