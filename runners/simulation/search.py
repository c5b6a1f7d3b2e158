"""Search the profile space by simulation.

An evolutionary search: generations of a fixed size, parents from the best so far, each child a parent (or a crossing of
two) with one to three values changed. The same seed gives the same search, on any number of processes.

Each profile is tried on the trace as it is and on the same trace somewhat faster, and the worst counts double: a 99th
percentile rests on a handful of requests, and a profile that fits just those does worse on the next day's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

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
TEMPOS = (1.0, 1.15, 1.3)
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
    """A profile, what the trace as it is gives with it, and its score over all tempos."""

    candidate: Candidate
    summary: Summary
    score: float


class Trials:
    """Tries candidates on one trace at every tempo and scores them against the base profile."""

    def __init__(self, arrivals: Sequence[Arrival], base: Profile, device: Device, slo: Slo) -> None:
        self.base = base
        self._slo = slo
        self._tasks = [(hastened(arrivals, tempo), base, device) for tempo in TEMPOS]
        self._base_summaries = [_evaluate((*task, ())) for task in self._tasks]
        if self._base_summaries[0].failed == len(arrivals):
            raise StartupError("the base profile serves no request of this trace on this device")

    def run(self, candidates: Sequence[Candidate], pool: ProcessPoolExecutor | _Inline) -> list[Evaluation]:
        """One evaluation a candidate, in their order."""
        tasks = [(*task, candidate) for candidate in candidates for task in self._tasks]
        summaries = iter(list(pool.map(_evaluate, tasks)))
        return [self.score(candidate, [next(summaries) for _ in TEMPOS]) for candidate in candidates]

    def score(self, candidate: Candidate, summaries: Sequence[Summary]) -> Evaluation:
        pairs = zip(summaries, self._base_summaries, strict=True)
        scores = [self._slo.score(summary, base_summary) for summary, base_summary in pairs]
        return Evaluation(candidate, summaries[0], (sum(scores) / len(scores) + max(scores)) / 2)


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


def hastened(arrivals: Sequence[Arrival], tempo: float) -> list[Arrival]:
    """The same requests, `tempo` times as fast one after another."""
    return [replace(arrival, at_s=arrival.at_s / tempo) for arrival in arrivals]


def search(
    trials: Trials, *, starts: Iterable[Profile] = (), evaluations: int = 160, seed: int = 0, workers: int = 1
) -> Iterator[Evaluation]:
    """Evaluations as they come: the base first, then `starts` (other presets), then what the search makes of them."""
    generator = random.Random(seed)
    queue: list[Candidate] = [(), *(_difference(trials.base, start) for start in starts)]
    found: list[Evaluation] = []
    seen: set[Candidate] = set()
    with ProcessPoolExecutor(max_workers=workers) if workers > 1 else _Inline() as pool:
        while len(found) < evaluations:
            size = min(GENERATION, evaluations - len(found))
            generation = [candidate for candidate in dict.fromkeys(queue) if candidate not in seen][:size]
            queue = []
            parents = sorted(found, key=lambda evaluation: evaluation.score)[:_PARENTS]
            _fill(generation, size, [parent.candidate for parent in parents] or [()], seen, trials.base, generator)
            if not generation:
                return
            seen.update(generation)
            for evaluation in trials.run(generation, pool):
                found.append(evaluation)
                yield evaluation


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
    parents: Sequence[Candidate],
    seen: set[Candidate],
    base: Profile,
    generator: random.Random,
) -> None:
    """Children until the generation is full, or no new one is found for long."""
    misses = 0
    while len(generation) < size and misses < 1000:
        child = dict(parents[min(int(generator.expovariate(0.4)), len(parents) - 1)])
        if generator.random() < 0.3:
            other = dict(generator.choice(parents))
            for field in sorted({*child, *other}):
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


def simplify(evaluations: Sequence[Evaluation], trials: Trials) -> Evaluation:
    """The best of them, without the changes that gain nothing: none may cost more than 0.5 % of the score."""
    best = min(evaluations, key=lambda evaluation: (evaluation.score, len(evaluation.candidate)))
    allowed = best.score * 1.005
    for change in best.candidate:
        (simpler,) = trials.run([tuple(other for other in best.candidate if other != change)], _Inline())
        if simpler.score <= allowed:
            best = simpler
    return best
