"""Traces: who arrives when, with how many tokens. Counts and times only, never a text.

A trace file has one JSON object a line: `{"at_s": 0.25, "prompt_tokens": 120, "output_tokens": 64}`, optionally with
`"session"` (a name: the prompt counts the whole conversation so far), `"priority"` (0 is urgent) and `"key"`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runners.errors import StartupError

# No model reads more; a count beyond it is a slip that would fill the memory with made-up prompts.
MAX_TOKENS = 100_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace. `at_s` counts from the start of the trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    session: str | None = None
    priority: int = 0
    key: str = ""

    def to_json(self) -> str:
        """One line of a trace file; fields at their default are left out."""
        fields: dict[str, Any] = {
            "at_s": round(self.at_s, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }
        if self.session is not None:
            fields["session"] = self.session
        if self.priority:
            fields["priority"] = self.priority
        if self.key:
            fields["key"] = self.key
        return json.dumps(fields)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of token counts, drawn evenly on a logarithmic scale (short ones are more common)."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`128` or `20-2000`. ValueError on anything else."""
        low, _, high = text.partition("-")
        lengths = cls(int(low), int(high or low))
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r} is no range of token counts: write 128 or 20-2000")
        return lengths

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

    def draw(self, generator: random.Random) -> int:
        if self.low == self.high:
            return self.low
        return min(self.high, int(self.low * (((self.high + 1) / self.low) ** generator.random())))


def read_trace(path: Path) -> list[Arrival]:
    """Arrivals in order of time. StartupError that names file and line when one is no arrival."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {error}") from error
    arrivals = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                arrivals.append(_arrival(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise StartupError(f"{path}:{number}: no arrival: {error}") from error
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def _arrival(fields: dict[str, Any]) -> Arrival:
    if not isinstance(fields, dict):
        raise TypeError("not a JSON object")
    arrival = Arrival(**fields)
    for name in ("at_s", "prompt_tokens", "output_tokens", "priority"):
        value = getattr(arrival, name)
        if isinstance(value, bool) or not isinstance(value, (int, float) if name == "at_s" else int):
            raise TypeError(f"{name} is {value!r}")
    if not isinstance(arrival.session, str | None) or not isinstance(arrival.key, str):
        raise TypeError("session and key are names")
    is_in_range = (
        math.isfinite(arrival.at_s)
        and arrival.at_s >= 0
        and 1 <= arrival.prompt_tokens <= MAX_TOKENS
        and 0 <= arrival.output_tokens <= MAX_TOKENS
    )
    if not is_in_range:
        raise ValueError("a time or a count is out of range")
    return arrival


def burst(count: int, prompt: Lengths, output: Lengths, seed: int = 0) -> list[Arrival]:
    """`count` requests at once."""
    generator = random.Random(seed)
    return [Arrival(0.0, prompt.draw(generator), output.draw(generator)) for _ in range(count)]


def poisson(rate: float, count: int, prompt: Lengths, output: Lengths, seed: int = 0) -> list[Arrival]:
    """`count` requests, `rate` a second on average, independent of one another."""
    generator = random.Random(seed)
    arrivals = []
    at_s = 0.0
    for _ in range(count):
        at_s += generator.expovariate(rate)
        arrivals.append(Arrival(at_s, prompt.draw(generator), output.draw(generator)))
    return arrivals


def split(arrivals: Sequence[Arrival]) -> tuple[list[Arrival], list[Arrival]]:
    """The earlier and the later half by count; the later one starts from zero again. Sessions do not cross."""
    middle = len(arrivals) // 2
    first, second = list(arrivals[:middle]), list(arrivals[middle:])
    if not second:
        return first, second
    offset = second[0].at_s
    return first, [
        Arrival(a.at_s - offset, a.prompt_tokens, a.output_tokens, a.session, a.priority, a.key) for a in second
    ]
