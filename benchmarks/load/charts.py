"""Curves and timelines as inline SVG whose colours come from the page's style sheet (light and dark)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.load.records import Record
from runners.simulation.axes import Scale, label, nice_step

WIDTH, HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 546, 18, 252
_CURVE_POINTS = 300
_LANES_HEIGHT = 420
MAX_LANES = 128


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in order of x. `place` picks the colour: the server's place in the report."""

    name: str
    place: int
    points: Sequence[tuple[float, float]]
    dashed: bool = False


def line_chart(
    title: str,
    curves: Sequence[Curve],
    x_label: str,
    y_label: str,
    *,
    log_x: bool = False,
    log_y: bool = False,
    dots: bool = True,
    y_top: float | None = None,
) -> str:
    """A `figure` with a caption, nothing when there is no point. A log axis leaves out what is not above 0."""
    shown = [
        Curve(c.name, c.place, [p for p in c.points if (p[0] > 0 or not log_x) and (p[1] > 0 or not log_y)], c.dashed)
        for c in curves
    ]
    points = [point for curve in shown for point in curve.points]
    if not points:
        return ""
    x = _scale([px for px, _ in points], _LEFT + 8, _RIGHT - 12, log_x, from_zero=False)
    y = _scale([py for _, py in points] + ([y_top] if y_top else []), _BOTTOM, _TOP, log_y, from_zero=True)
    parts = [_grid(x, y, x_label, y_label)]
    for curve in shown:
        path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in curve.points)
        dash = " dashed" if curve.dashed else ""
        parts.append(f'<polyline class="curve s{curve.place}{dash}" points="{path}"/>')
        if dots:
            parts += [
                f'<circle class="dot s{curve.place}" cx="{x(px):.1f}" cy="{y(py):.1f}" r="3.5">'
                f"<title>{escape(curve.name)}: {label(round(px, 3))} → {label(round(py, 3))}</title></circle>"
                for px, py in curve.points
            ]
    return _figure(title, WIDTH, HEIGHT, "".join(parts))


def distribution(title: str, values: Sequence[tuple[str, int, Sequence[float]]], x_label: str) -> str:
    """Share of values at most x, for (name, place, sorted values) each; x logarithmic."""
    curves = [Curve(name, place, _cumulative(ordered)) for name, place, ordered in values if ordered]
    return line_chart(title, curves, x_label, "share at most", log_x=True, dots=False, y_top=1.0)


def _cumulative(ordered: Sequence[float]) -> list[tuple[float, float]]:
    count = len(ordered)
    places = sorted({round(i * (count - 1) / _CURVE_POINTS) for i in range(_CURVE_POINTS + 1)})
    return [(ordered[place], (place + 1) / count) for place in places]


def token_timeline(title: str, place: int, records: Sequence[Record], until_s: float) -> str:
    """A lane a request in order of sending: the wait for the first token pale, then a mark for every token."""
    lanes = sorted((record for record in records if record.ok), key=lambda record: record.sent_at)[:MAX_LANES]
    if not lanes:
        return ""
    start = lanes[0].sent_at
    lane = min(14.0, _LANES_HEIGHT / len(lanes))
    bottom = _TOP + lane * len(lanes)
    x = Scale(0.0, until_s, _LEFT, _RIGHT)
    parts = [
        f'<line class="grid" x1="{x(at):.1f}" y1="{_TOP}" x2="{x(at):.1f}" y2="{bottom:.1f}"/>'
        f'<text class="tick" x="{x(at):.1f}" y="{bottom + 16:.1f}" text-anchor="middle">{label(round(at, 6))}</text>'
        for at in x.ticks(6)
    ]
    for number, record in enumerate(lanes):
        top = _TOP + number * lane
        sent = record.sent_at - start
        first = x(sent + record.ttft_s)
        words = (
            f"request {record.request.index}: first token {1000 * record.ttft_s:.1f} ms, {record.output_tokens} tokens"
        )
        parts.append(f'<g class="s{place}"><title>{escape(words)}</title>')
        parts.append(_bar("wait", x(sent), first, top, lane))
        parts.append(_bar("run", first, x(sent + record.token_at_s[-1]), top, lane))
        marks = _thinned([x(sent + at_s) for at_s in record.token_at_s])
        middle, half = top + lane / 2, max(0.5, lane / 2 - 0.5)
        parts.append(
            f'<path class="marks" d="{"".join(f"M{m:.1f} {middle - half:.1f}v{2 * half:.1f}" for m in marks)}"/></g>'
        )
    parts.append(f'<text class="tick" x="{_RIGHT}" y="{bottom + 34:.1f}" text-anchor="end">seconds</text>')
    parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{_TOP + 9}" text-anchor="end">request</text>')
    return _figure(title, WIDTH, bottom + 42, "".join(parts))


def _bar(name: str, left: float, right: float, top: float, lane: float) -> str:
    gap = min(1.0, lane / 6)
    width = max(0.5, right - left)
    return (
        f'<rect class="{name}" x="{left:.1f}" y="{top + gap:.1f}" width="{width:.1f}" height="{lane - 2 * gap:.1f}"/>'
    )


def _thinned(places: Sequence[float]) -> list[float]:
    """Marks at least a pixel apart: more cannot be told apart, and the page stays small."""
    kept: list[float] = []
    for place in places:
        if not kept or place - kept[-1] >= 1.2:
            kept.append(place)
    return kept


def _scale(values: Sequence[float], start: float, end: float, log: bool, *, from_zero: bool) -> Scale:
    low, high = min(values), max(values)
    if log:
        # Ends on round numbers, so that at least two ticks stand at the axis.
        below = 10 ** math.floor(math.log10(low))
        low = max(base * below for base in (1, 2, 5) if base * below <= low * (1 + 1e-9))
        return Scale(low, max(nice_step(high), 2 * low), start, end, log=True)
    if from_zero:
        low, high = 0.0, high * 1.06 or 1.0
    elif low == high:
        low, high = low - 0.5, high + 0.5
    return Scale(low, high, start, end)


def _grid(x: Scale, y: Scale, x_label: str, y_label: str) -> str:
    parts = []
    for value in x.ticks(6):
        at = x(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{_TOP}" x2="{at:.1f}" y2="{_BOTTOM}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{_BOTTOM + 16}" text-anchor="middle">{label(value)}</text>')
    for value in y.ticks(5):
        at = y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{at:.1f}" x2="{_RIGHT}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label(round(value, 9))}</text>'
        )
    parts.append(f'<path class="axis" d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}"/>')
    parts.append(f'<text class="tick" x="{_RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{escape(x_label)}</text>')
    parts.append(f'<text class="tick" x="{_LEFT}" y="{HEIGHT - 12}">{escape(y_label)} (up)</text>')
    return "".join(parts)


def _figure(title: str, width: float, height: float, content: str) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}">{content}</svg></figure>'
    )
