"""What each slot did when, and how latencies are distributed: the picture of one or more simulations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runners.simulation.axes import Scale, Series, draw_series, frame, label, legend
from runners.simulation.drawing import FAINT, GRID, INK, Drawing
from runners.simulation.run import Simulation
from runners.simulation.summary import first_token_s

# Paul Tol's bright scheme: told apart by colour-blind people too.
KIND_COLOURS = {
    "wave": "#4477AA",
    "chunk": "#66CCEE",
    "mixed": "#AA3377",
    "overlap_prefill": "#EE6677",
    "decode": "#228833",
    "sequential": "#CCBB44",
}
MIXED_ROW_COLOUR = "#DDAACC"
PROFILE_COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377", "#66CCEE")

_WIDTH = 1200
_LEFT, _RIGHT = 70, _WIDTH - 24
_DEFAULT_STEPS = 250
_CURVE_HEIGHT = 240
_CURVE_POINTS = 400
# As many as fit the width; the whole subtitle is what a screen reader says.
_SUBTITLE_CHARS = 165


@dataclass(slots=True)
class Span:
    """One slot serving one request in one way, over one or several steps without a gap."""

    slot: int
    request_id: str
    kind: str
    start: float
    end: float
    tokens: int


def spans(simulation: Simulation, start: float, end: float) -> list[Span]:
    """Steps of the window, joined as long as slot, request and kind stay the same."""
    done: list[Span] = []
    open_spans: dict[int, Span] = {}
    for trace in simulation.steps:
        if trace.end <= start or trace.start >= end:
            continue
        kind = trace.plan.kind.value
        row_kind = "mixed row" if kind == "mixed" else kind
        parts = [(row.slot, row.request_id, row_kind, 1) for row in trace.plan.decode_rows]
        parts += [(chunk.slot, chunk.request_id, kind, len(chunk.token_ids)) for chunk in trace.plan.chunks]
        for slot, request_id, part_kind, tokens in parts:
            span = open_spans.get(slot)
            joins = span is not None and (span.request_id, span.kind) == (request_id, part_kind)
            if span is not None and joins and part_kind in ("decode", "sequential") and trace.start - span.end < 1e-9:
                span.end = trace.end
                span.tokens += tokens
            else:
                span = open_spans[slot] = Span(slot, request_id, part_kind, trace.start, trace.end, tokens)
                done.append(span)
    return done


def default_window(simulations: Sequence[Simulation]) -> tuple[float, float]:
    """From the first step on, as many steps as can be told apart."""
    ends = [simulation.steps[min(_DEFAULT_STEPS, len(simulation.steps)) - 1].end for simulation in simulations]
    return min(simulation.steps[0].start for simulation in simulations), max(ends)


def draw(simulations: Sequence[Simulation], *, subtitle: str, window: tuple[float, float] | None = None) -> Drawing:
    """A timeline a simulation, then TTFT and ITL curves of all. ValueError when no step was kept."""
    if not simulations or not all(simulation.steps for simulation in simulations):
        raise ValueError("nothing to draw: no step was recorded")
    start, end = window or default_window(simulations)
    all_spans = [spans(simulation, start, end) for simulation in simulations]
    lanes = [sorted({span.slot for span in found}) for found in all_spans]
    heights = [len(slots) * _lane_height(len(slots)) for slots in lanes]
    height = 96 + sum(lane_height + 74 for lane_height in heights) + _CURVE_HEIGHT + 90
    title = "Simulated timeline: " + ", ".join(simulation.profile_name for simulation in simulations)
    drawing = Drawing(_WIDTH, height, title, subtitle)
    drawing.text(_LEFT, 32, title, size=18, bold=True)
    shown_subtitle = subtitle if len(subtitle) <= _SUBTITLE_CHARS else f"{subtitle[: _SUBTITLE_CHARS - 1]}…"
    drawing.text(_LEFT, 52, shown_subtitle, size=12, fill=FAINT)
    shown = {span.kind for found in all_spans for span in found}
    entries = [(name.replace("_", " "), colour) for name, colour in KIND_COLOURS.items() if name in shown]
    if "mixed row" in shown:
        entries.append(("decode row of a mixed step", MIXED_ROW_COLOUR))
    legend(drawing, _LEFT, 76, entries)
    top = 96.0
    scale = Scale(start, end, _LEFT, _RIGHT)
    for simulation, found, slots in zip(simulations, all_spans, lanes, strict=True):
        top = _draw_lanes(drawing, scale, top, simulation.profile_name, found, slots)
    _draw_curves(drawing, top + 30, simulations)
    return drawing


def _lane_height(lanes: int) -> float:
    return max(5.0, min(16.0, 360 / max(1, lanes)))


def _draw_lanes(
    drawing: Drawing, x: Scale, top: float, name: str, found: Sequence[Span], slots: Sequence[int]
) -> float:
    """One timeline, a lane for each slot that did something; returns where the next may begin."""
    lane = _lane_height(len(slots))
    lane_of = {slot: place for place, slot in enumerate(slots)}
    top += 22
    bottom = top + len(slots) * lane
    drawing.text(_LEFT, top - 8, name, size=13, bold=True)
    for value in x.ticks(10):
        drawing.line([(x(value), top), (x(value), bottom)], GRID)
        drawing.text(x(value), bottom + 16, label(round(value * 1000, 6)), size=11, anchor="middle", fill=FAINT)
    for slot in slots[:: max(1, round(16 / lane))]:
        drawing.text(_LEFT - 8, top + (lane_of[slot] + 0.5) * lane + 4, str(slot), size=10, anchor="end", fill=FAINT)
    for span in found:
        left, right = x(max(span.start, x.low)), x(min(span.end, x.high))
        colour = MIXED_ROW_COLOUR if span.kind == "mixed row" else KIND_COLOURS[span.kind]
        words = (
            f"request {span.request_id}, {span.kind.replace('_', ' ')}: {span.tokens} tokens, "
            f"{span.start * 1000:.2f} to {span.end * 1000:.2f} ms"
        )
        gap = min(0.6, lane / 8)
        lane_top = top + lane_of[span.slot] * lane
        drawing.rect(left, lane_top + gap, max(0.4, right - left - 0.5), lane - 2 * gap, colour, words)
    drawing.line([(_LEFT, top), (_LEFT, bottom), (_RIGHT, bottom)], INK)
    drawing.text(_RIGHT, bottom + 32, "time [ms]", size=11, anchor="end", fill=FAINT)
    drawing.text(18, (top + bottom) / 2, "slot", size=11, fill=FAINT)
    return bottom + 52


def _draw_curves(drawing: Drawing, top: float, simulations: Sequence[Simulation]) -> None:
    middle = (_LEFT + _RIGHT) / 2
    ttft = [
        sorted(1000 * value for record in simulation.requests if (value := first_token_s(record)) is not None)
        for simulation in simulations
    ]
    itl = [sorted(1000 * value for value in simulation.inter_token_s) for simulation in simulations]
    names = [simulation.profile_name for simulation in simulations]
    _draw_cumulative(drawing, _LEFT, middle - 40, top, "Time to first token", names, ttft)
    _draw_cumulative(drawing, middle + 40, _RIGHT, top, "Inter-token latency", names, itl)
    entries = [(name, PROFILE_COLOURS[place % len(PROFILE_COLOURS)]) for place, name in enumerate(names)]
    legend(drawing, _LEFT, top + _CURVE_HEIGHT + 52, entries)


def _draw_cumulative(
    drawing: Drawing,
    left: float,
    right: float,
    top: float,
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[float]],
) -> None:
    """Share of requests (or tokens) that took at most so long; logarithmic time."""
    present = [ordered for ordered in values if ordered]
    if not present:
        return
    low = max(1e-3, min(ordered[0] for ordered in present)) * 0.9
    high = max(ordered[-1] for ordered in present) * 1.1
    x = Scale(low, max(high, low * 1.5), left, right, log=True)
    y = Scale(0, 100, top + _CURVE_HEIGHT, top)
    frame(drawing, x, y, title=title, x_label="at most so many ms", y_label="% of all")
    for place, (name, ordered) in enumerate(zip(names, values, strict=True)):
        if ordered:
            colour = PROFILE_COLOURS[place % len(PROFILE_COLOURS)]
            draw_series(drawing, x, y, Series(name, colour, _cumulative(ordered)))


def _cumulative(ordered: Sequence[float]) -> list[tuple[float, float]]:
    """Corners of the staircase, at most so many of them that it still looks smooth."""
    count = len(ordered)
    points = [(ordered[0], 0.0)]
    for place in range(0, count, max(1, count // _CURVE_POINTS)):
        points += [(ordered[place], points[-1][1]), (ordered[place], 100 * (place + 1) / count)]
    return [*points, (ordered[-1], points[-1][1]), (ordered[-1], 100.0)]
