"""Does the time of a refusal tell how near a wrong API key was?

Keys that share none, half, or all but one character of a right one are refused in turns; who listens from outside would
have to tell their distributions apart.

    python -m benchmarks.key_timing
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from configs.api_keys import hash_key
from configs.operation import ApiKeySection
from runners.api.access import Access
from runners.errors import AuthenticationError

RIGHT = "k" * 64
SHARED_CHARACTERS = (0, 32, 63)


def times_ns(access: Access, rounds: int) -> dict[int, list[int]]:
    """Of each guess, in random order within a round: what slows the machine slows all of them alike."""
    guesses = {same: b"Bearer " + (RIGHT[:same] + "-" * (64 - same)).encode() for same in SHARED_CHARACTERS}
    taken: dict[int, list[int]] = {same: [] for same in guesses}
    order = list(guesses)
    rng = random.Random(7)
    for _ in range(rounds):
        rng.shuffle(order)
        for same in order:
            headers = [(b"authorization", guesses[same])]
            started = time.perf_counter_ns()
            try:
                with access.request(headers, needs_admin=False):
                    raise SystemExit("a wrong key was let in")
            except AuthenticationError:
                taken[same].append(time.perf_counter_ns() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.key_timing", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50_000)
    options = parser.parse_args()
    keys = [ApiKeySection(name=f"k{number}", sha256=hash_key(f"other-{number}")) for number in range(7)]
    access = Access([ApiKeySection(name="right", sha256=hash_key(RIGHT)), *keys])
    taken = times_ns(access, options.rounds)
    for same, values in taken.items():
        quarters = statistics.quantiles(values, n=20)
        # How often it took longer than the guess that shares nothing: half of the times if there is nothing to learn.
        longer = sum(a > b for a, b in zip(values, taken[0], strict=True))
        equal = sum(a == b for a, b in zip(values, taken[0], strict=True))
        print(
            f"{same:2} of 64 characters right: median {statistics.median(values):.0f} ns, 5 % {quarters[0]:.0f}, "
            f"95 % {quarters[-1]:.0f}; longer than 0 right in {(longer + equal / 2) / len(values):.1%}"
        )


if __name__ == "__main__":
    main()
