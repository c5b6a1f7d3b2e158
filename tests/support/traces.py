"""Traces as files, as the recorder writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runners.simulation.trace import Arrival


def write_trace(path: Path, arrivals: Sequence[Arrival]) -> None:
    path.write_text("".join(arrival.to_json() + "\n" for arrival in arrivals))
