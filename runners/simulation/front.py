"""The picture of a search: every profile tried, the front, and the one that was chosen on the part it had not seen."""

from __future__ import annotations

from collections.abc import Sequence

from runners.simulation.axes import Scale, Series, draw_series, frame, legend
from runners.simulation.drawing import FAINT, Drawing
from runners.simulation.search import Evaluation, Slo, metric, pareto_front

_WIDTH, _HEIGHT = 980, 620
_BASE, _CHOSEN, _FRONT, _LIMIT = "#EE6677", "#228833", "#4477AA", "#AA3377"
_TRIED = "#BBBBBB"


def axes_of(slo: Slo) -> tuple[str, str]:
    """The two metrics to draw: the first two of the SLO, filled up with TTFT and ITL p99."""
    names = [name for name, _ in slo.limits]
    names += [name for name in ("ttft_p99_ms", "itl_p99_ms") if name not in names]
    return names[0], names[1]


def draw_front(
    evaluations: Sequence[Evaluation], chosen: Evaluation, slo: Slo, *, title: str, subtitle: str
) -> Drawing:
    """Logarithmic scales. The first evaluation is the base profile."""
    x_name, y_name = axes_of(slo)
    xs = [metric(evaluation.summary, x_name) for evaluation in evaluations]
    ys = [metric(evaluation.summary, y_name) for evaluation in evaluations]
    drawing = Drawing(_WIDTH, _HEIGHT, title, subtitle)
    drawing.text(70, 32, title, size=18, bold=True)
    drawing.text(70, 52, subtitle, size=12, fill=FAINT)
    x = Scale(max(1e-3, min(xs)) * 0.85, max(xs) * 1.15, 70, _WIDTH - 30, log=True)
    y = Scale(max(1e-3, min(ys)) * 0.85, max(ys) * 1.15, _HEIGHT - 96, 110, log=True)
    frame(
        drawing, x, y, title="Every profile tried, on the training half", x_label=_words(x_name), y_label=_words(y_name)
    )
    _draw_limits(drawing, x, y, slo, x_name, y_name)
    for evaluation, px, py in zip(evaluations, xs, ys, strict=True):
        drawing.dot(x(px), y(py), 3, _TRIED, _describe(evaluation, x_name, y_name))
    front = pareto_front(evaluations, x_name, y_name)
    points = [(metric(e.summary, x_name), metric(e.summary, y_name)) for e in front]
    draw_series(drawing, x, y, Series("front", _FRONT, points))
    for evaluation, (px, py) in zip(front, points, strict=True):
        drawing.dot(x(px), y(py), 4, _FRONT, _describe(evaluation, x_name, y_name))
    for evaluation, colour in ((evaluations[0], _BASE), (chosen, _CHOSEN)):
        px, py = metric(evaluation.summary, x_name), metric(evaluation.summary, y_name)
        drawing.dot(x(px), y(py), 7, colour, _describe(evaluation, x_name, y_name))
    entries = [("tried", _TRIED), ("front", _FRONT), ("base profile", _BASE), ("chosen", _CHOSEN), ("limit", _LIMIT)]
    legend(drawing, 70, _HEIGHT - 24, entries)
    return drawing


def _draw_limits(drawing: Drawing, x: Scale, y: Scale, slo: Slo, x_name: str, y_name: str) -> None:
    for name, limit in slo.limits:
        if name == x_name and x.low < limit < x.high:
            drawing.line([(x(limit), y.start), (x(limit), y.end)], _LIMIT, 1.5)
        elif name == y_name and y.low < limit < y.high:
            drawing.line([(x.start, y(limit)), (x.end, y(limit))], _LIMIT, 1.5)


def _words(name: str) -> str:
    distribution, part, _ = name.split("_")
    return f"{distribution.upper()} {part} [ms]"


def _describe(evaluation: Evaluation, x_name: str, y_name: str) -> str:
    changes = ", ".join(f"{field}={value}" for field, value in evaluation.candidate) or "the base profile"
    values = ", ".join(f"{_words(name)} {metric(evaluation.summary, name):.1f}" for name in (x_name, y_name))
    return f"{changes}: {values}"
