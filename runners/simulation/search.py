"""Search the profile space by simulation.

An evolutionary search: generations of a fixed size, parents from the best so far, each child a parent (or a crossing of
two) with one to three values changed. The same seed gives the same search, on any number of processes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from configs.schema import Profile
from runners.errors import StartupError
from runners.simulation.run import Device, simulate
from runners.simulation.summary import Summary, summarize
from runners.simulation.trace import Arrival

Value = int | str | bool
Candidate = tuple[tuple[str, Value], ...]
"""(dotted field, value), sorted by field; what is not named keeps the base profile's value."""

SPACE: dict[str, tuple[Value, ...]] = {
    "engine.slots": (32, 64, 96, 128, 192, 256),
    "admission.min_batch": (1, 2, 4, 8, 16),
    "admission.max_hold_steps": (0, 1, 2, 4),
    "admission.max_long_prompts": (2, 4, 8, 16),
    "admission.cold_window_us": (0, 1000, 2000, 4000, 8000),
    "admission.cold_silence_us": (0, 200, 400, 800, 1600),
    "wave.max_prompt_tokens": (32, 64, 96, 128, 192, 256, 512),
    "wave.sub_wave": (4, 8, 16, 32, 64),
    "chunk.tokens": (0, 256, 512, 1024, 2048),
    "mix.mode": ("merge", "off", "overlap"),
    "mix.token_budget": (128, 256, 512, 768, 1024, 1536, 2048, 4096, 8192),
    "mix.min_prompt_tokens": ("auto", 1, 16, 32, 64, 128, 256),
}

GENERATION = 16
_PARENTS = 10
_METRICS = tuple(
    f"{name}_{part}_ms" for name in ("ttft", "itl", "e2e") for part in ("mean", "p50", "p90", "p99", "max")
)


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds by metric, such as `ttft_p99_ms`."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft_p99_ms=200,itl_p99_ms=20`. ValueError that names what is wrong."""
        limits = []
        for part in text.split(","):
            name, _, value = part.partition("=")
            if name not in _METRICS:
                raise ValueError(f"{name!r} is no metric; there are {', '.join(_METRICS)}")
            limit = float(value or "nan")
            if not limit > 0:
                raise ValueError(f"{part!r}: write a limit above zero, such as {name}=200")
            limits.append((name, limit))
        return cls(tuple(limits))

    def __str__(self) -> str:
        return ", ".join(f"{name}={limit:g}" for name, limit in self.limits)

    def score(self, summary: Summary, base: Summary) -> float:
        """Lower is better: limits first, then how far below them; losing requests or throughput costs most."""
        shares = [metric(summary, name) / limit for name, limit in self.limits]
        excess = sum(max(0.0, share - 1) for share in shares)
        lost = max(0.0, 1 - summary.output_tokens_per_s / base.output_tokens_per_s)
        failures = summary.failed - base.failed
        return 10 * excess + sum(shares) / len(shares) + 100 * lost + 1000 * max(0, failures)


def metric(summary: Summary, name: str) -> float:
    """A metric by its name in an SLO [ms]."""
    distribution, part, _ = name.split("_")
    value = getattr(getattr(summary, distribution), part)
    assert isinstance(value, float)
    return value


@dataclass(frozen=True, slots=True)
class Evaluation:
    candidate: Candidate
    summary: Summary
    score: float


def apply(base: Profile, candidate: Candidate) -> Profile:
    """The base profile with the candidate's values."""
    values = base.model_dump(mode="python")
    for field, value in candidate:
        section, name = field.split(".")
        values[section][name] = value
    return Profile.model_validate(values)


def value_of(profile: Profile, field: str) -> Value:
    section, name = field.split(".")
    value = getattr(getattr(profile, section), name)
    assert isinstance(value, int | str)
    return value


def search(
    arrivals: Sequence[Arrival],
    base: Profile,
    device: Device,
    slo: Slo,
    *,
    starts: Iterable[Profile] = (),
    evaluations: int = 240,
    seed: int = 0,
    workers: int = 1,
) -> Iterator[Evaluation]:
    """Evaluations as they come, the base first, then `starts` (other presets), then what the search makes of them.

    StartupError when the base fails every request: there is nothing to compare with.
    """
    generator = random.Random(seed)
    base_summary = _evaluate((arrivals, base, device, ()))
    if base_summary.failed == base_summary.requests:
        raise StartupError("the base profile serves no request of this trace on this device")
    found = [Evaluation((), base_summary, slo.score(base_summary, base_summary))]
    seen: set[Candidate] = {()}
    yield found[0]
    queue = [_difference(base, start) for start in starts]
    with ProcessPoolExecutor(max_workers=workers) if workers > 1 else _Inline() as pool:
        while len(found) < evaluations:
            size = min(GENERATION, evaluations - len(found))
            generation = [candidate for candidate in dict.fromkeys(queue) if candidate not in seen][:size]
            queue = []
            parents = sorted(found, key=lambda evaluation: evaluation.score)[:_PARENTS]
            _fill(generation, size, parents, seen, base, generator)
            if not generation:
                return
            seen.update(generation)
            summaries = pool.map(_evaluate, [(arrivals, base, device, candidate) for candidate in generation])
            for candidate, summary in zip(generation, summaries, strict=True):
                found.append(Evaluation(candidate, summary, slo.score(summary, base_summary)))
                yield found[-1]


class _Inline:
    """A pool of no processes."""

    map = staticmethod(map)

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _evaluate(task: tuple[Sequence[Arrival], Profile, Device, Candidate]) -> Summary:
    arrivals, base, device, candidate = task
    return summarize(simulate(arrivals, apply(base, candidate), device))


def _difference(base: Profile, other: Profile) -> Candidate:
    """What of `other` lies in the search space and differs from the base."""
    return tuple(
        sorted((field, value_of(other, field)) for field in SPACE if value_of(other, field) != value_of(base, field))
    )


def _fill(
    generation: list[Candidate],
    size: int,
    parents: Sequence[Evaluation],
    seen: set[Candidate],
    base: Profile,
    generator: random.Random,
) -> None:
    """Children until the generation is full, or no new one is found for long."""
    misses = 0
    while len(generation) < size and misses < 1000:
        child = dict(parents[min(int(generator.expovariate(0.4)), len(parents) - 1)].candidate)
        if generator.random() < 0.3:
            other = dict(generator.choice(parents).candidate)
            for field in {*child, *other}:
                if generator.random() < 0.5:
                    child.pop(field, None)
                    if field in other:
                        child[field] = other[field]
        for _ in range(generator.randint(1, 3)):
            field = generator.choice(list(SPACE))
            child[field] = generator.choice(SPACE[field])
        candidate = tuple(sorted((field, value) for field, value in child.items() if value != value_of(base, field)))
        if candidate in seen or candidate in generation:
            misses += 1
        else:
            generation.append(candidate)


def pareto_front(evaluations: Sequence[Evaluation], x: str, y: str) -> list[Evaluation]:
    """Those that no other beats in both metrics, by rising x."""
    front: list[Evaluation] = []
    for evaluation in sorted(evaluations, key=lambda e: (metric(e.summary, x), metric(e.summary, y))):
        if not front or metric(evaluation.summary, y) < metric(front[-1].summary, y):
            front.append(evaluation)
    return front


def simplify(
    evaluations: Sequence[Evaluation], arrivals: Sequence[Arrival], base: Profile, device: Device, slo: Slo
) -> Evaluation:
    """The best of them, without the changes that gain nothing: none may cost more than 0.5 % of the score."""
    best = min(evaluations, key=lambda evaluation: (evaluation.score, len(evaluation.candidate)))
    allowed = best.score * 1.005
    for change in best.candidate:
        candidate = tuple(other for other in best.candidate if other != change)
        summary = _evaluate((arrivals, base, device, candidate))
        score = slo.score(summary, evaluations[0].summary)
        if score <= allowed:
            best = Evaluation(candidate, summary, score)
    return best
