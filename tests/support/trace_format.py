"""What Chrome's trace format asks of events, and what a viewer needs to show them well."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

Event = dict[str, Any]


def check_format(events: list[Event]) -> None:
    """What the format asks of every event, and that slices of one track do not overlap."""
    names = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in events:
        assert event["ph"] in "XCiM"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["name"]
        if event["ph"] == "M":
            continue
        assert event["ts"] > 0
        if event["ph"] == "C":
            assert event["args"]
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            assert (event["pid"], event["tid"]) in names, f"{event} is on a track without a name"
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        track = event["pid"], event["tid"]
        assert event["dur"] >= 0
        assert event["ts"] >= ends[track] - 1e-3, f"{event} overlaps the slice before it"
        ends[track] = event["ts"] + event["dur"]
