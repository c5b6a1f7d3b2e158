"""Scales, ticks and frames for curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from runners.simulation.drawing import FAINT, GRID, INK, Drawing


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to a pixel; `log` takes values above zero."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, count: int = 6) -> list[float]:
        """Round values inside the range, about `count` of them."""
        if self.log:
            decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            few = math.log10(self.high / self.low) < 2.2
            candidates = [base * 10.0**decade for decade in decades for base in ((1, 2, 5) if few else (1,))]
        else:
            step = nice_step((self.high - self.low) / max(1, count))
            first = math.ceil(self.low / step - 1e-9)
            candidates = [step * number for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        slack = 1e-9 * abs(self.high)
        return [value for value in candidates if self.low - slack <= value <= self.high + slack]


def nice_step(rough: float) -> float:
    """The smallest of 1, 2, 5 × 10^k that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(base * power for base in (1, 2, 5, 10) if base * power >= rough * (1 - 1e-9))


def label(value: float) -> str:
    """A tick's number without needless digits."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    colour: str
    points: Sequence[tuple[float, float]]


def frame(drawing: Drawing, x: Scale, y: Scale, *, title: str, x_label: str, y_label: str) -> None:
    """Grid, ticks and words around a panel; x grows to the right, y upwards."""
    left, right, bottom, top = x.start, x.end, y.start, y.end
    drawing.text(left, top - 12, title, size=13, bold=True)
    for value in x.ticks():
        drawing.line([(x(value), top), (x(value), bottom)], GRID)
        drawing.text(x(value), bottom + 16, label(value), size=11, anchor="middle", fill=FAINT)
    for value in y.ticks(5):
        drawing.line([(left, y(value)), (right, y(value))], GRID)
        drawing.text(left - 6, y(value) + 4, label(value), size=11, anchor="end", fill=FAINT)
    drawing.line([(left, top), (left, bottom), (right, bottom)], INK)
    drawing.text((left + right) / 2, bottom + 34, x_label, size=11, anchor="middle", fill=FAINT)
    drawing.text(right, top - 12, y_label, size=11, anchor="end", fill=FAINT)


def draw_series(drawing: Drawing, x: Scale, y: Scale, series: Series) -> None:
    if len(series.points) > 1:
        drawing.line([(x(px), y(py)) for px, py in series.points], series.colour, 2)


def legend(drawing: Drawing, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """(name, colour) side by side, starting at x."""
    for name, colour in entries:
        drawing.rect(x, y - 9, 12, 10, colour)
        drawing.text(x + 17, y, name, size=12)
        x += 17 + 7.4 * len(name) + 18
