"""Three made-up loads with names, the same to the last arrival every time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from runners.simulation.trace import Arrival, Lengths, poisson


def bursty_chat(count: int = 800, seed: int = 1) -> list[Arrival]:
    """Chats that come in bursts of 10 to 120 within a tenth of a second, about every second."""
    generator = random.Random(seed)
    prompt, output = Lengths(20, 400), Lengths(40, 300)
    arrivals: list[Arrival] = []
    at_s = 0.0
    while len(arrivals) < count:
        at_s += 0.3 + generator.expovariate(1 / 0.7)
        size = min(generator.randint(10, 120), count - len(arrivals))
        arrivals += [
            Arrival(at_s + generator.uniform(0, 0.1), prompt.draw(generator), output.draw(generator))
            for _ in range(size)
        ]
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def long_documents(count: int = 300, seed: int = 2) -> list[Arrival]:
    """Documents of 1,000 to 12,000 tokens to summarise, 3.5 a second, among short questions."""
    documents = poisson(3.5, count * 2 // 3, Lengths(1000, 12_000), Lengths(60, 300), seed)
    questions = poisson(1.75, count - len(documents), Lengths(20, 200), Lengths(20, 200), seed + 1)
    return sorted(documents + questions, key=lambda arrival: arrival.at_s)


def steady_short(count: int = 1200, seed: int = 3) -> list[Arrival]:
    """Short prompts and short answers at an even 90 a second."""
    return poisson(90.0, count, Lengths(16, 96), Lengths(16, 64), seed)


NAMED_TRACES: Mapping[str, Callable[[], list[Arrival]]] = {
    "bursty-chat": bursty_chat,
    "long-documents": long_documents,
    "steady-short": steady_short,
}
