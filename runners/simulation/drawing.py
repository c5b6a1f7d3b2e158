"""Rectangles, lines and words on a page, as self-contained HTML (inline SVG) or as PNG.

Units are pixels from the top left corner. HTML needs nothing; PNG is drawn by matplotlib, which only development needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Literal

from runners.errors import StartupError

INK = "#1a1a1a"
FAINT = "#767676"
GRID = "#dddddd"
PAPER = "#ffffff"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
_DPI = 100

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""
    """Shown when the pointer rests on it (HTML only)."""


@dataclass(frozen=True, slots=True)
class Line:
    points: tuple[tuple[float, float], ...]
    stroke: str
    width: float = 1.0


@dataclass(frozen=True, slots=True)
class Dot:
    x: float
    y: float
    radius: float
    fill: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float
    """Baseline."""
    text: str
    size: float = 12
    anchor: Anchor = "start"
    fill: str = INK
    bold: bool = False


@dataclass(slots=True)
class Drawing:
    """What is on the page, in drawing order. `description` is what a screen reader says instead."""

    width: float
    height: float
    title: str
    description: str = ""
    shapes: list[Rect | Line | Dot | Text] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, title: str = "") -> None:
        self.shapes.append(Rect(x, y, width, height, fill, title))

    def line(self, points: Sequence[tuple[float, float]], stroke: str, width: float = 1.0) -> None:
        self.shapes.append(Line(tuple(points), stroke, width))

    def dot(self, x: float, y: float, radius: float, fill: str, title: str = "") -> None:
        self.shapes.append(Dot(x, y, radius, fill, title))

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: Anchor = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        self.shapes.append(Text(x, y, text, size, anchor, fill, bold))

    def save(self, path: Path, notes: str = "") -> None:
        """`.html` (with `notes` as preformatted text below) or `.png`. StartupError for another ending."""
        if path.suffix == ".html":
            path.write_text(to_html(self, notes))
        elif path.suffix == ".png":
            _save_png(self, path)
        else:
            raise StartupError(f"{path}: a plot is written as .html or .png")


def to_svg(drawing: Drawing) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawing.width:g} {drawing.height:g}" '
        f'width="{drawing.width:g}" height="{drawing.height:g}" font-family="{_FONT}" role="img">',
        f"<title>{escape(drawing.title)}</title><desc>{escape(drawing.description)}</desc>",
        f'<rect width="100%" height="100%" fill="{PAPER}"/>',
    ]
    parts += [_svg_shape(shape) for shape in drawing.shapes]
    return "\n".join([*parts, "</svg>"])


def _svg_shape(shape: Rect | Line | Dot | Text) -> str:
    match shape:
        case Rect():
            frame = f'x="{shape.x:.2f}" y="{shape.y:.2f}" width="{shape.width:.2f}" height="{shape.height:.2f}"'
            return _with_title(f'<rect {frame} fill="{shape.fill}"', "rect", shape.title)
        case Dot():
            frame = f'cx="{shape.x:.2f}" cy="{shape.y:.2f}" r="{shape.radius:g}"'
            return _with_title(f'<circle {frame} fill="{shape.fill}"', "circle", shape.title)
        case Line():
            points = " ".join(f"{x:.2f},{y:.2f}" for x, y in shape.points)
            return f'<polyline points="{points}" fill="none" stroke="{shape.stroke}" stroke-width="{shape.width:g}"/>'
        case Text():
            weight = ' font-weight="600"' if shape.bold else ""
            return (
                f'<text x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size:g}" '
                f'text-anchor="{shape.anchor}" fill="{shape.fill}"{weight}>{escape(shape.text)}</text>'
            )


def _with_title(opening: str, name: str, title: str) -> str:
    return f"{opening}><title>{escape(title)}</title></{name}>" if title else f"{opening}/>"


def to_html(drawing: Drawing, notes: str = "") -> str:
    """One file that needs no network."""
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(drawing.title)}</title>
<style>
body {{ margin: 0; background: {PAPER}; color: {INK}; font-family: {_FONT}; }}
main {{ overflow-x: auto; padding: 8px; }}
pre {{ font-size: 13px; padding: 0 24px 24px; overflow-x: auto; }}
</style>
<main>
{to_svg(drawing)}
</main>
<pre>{escape(notes)}</pre>
</html>
"""


def _save_png(drawing: Drawing, path: Path) -> None:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Circle, Rectangle
    except ImportError as error:
        raise StartupError(f"{path}: PNG needs matplotlib (pip install matplotlib); .html needs nothing") from error
    figure = Figure(figsize=(drawing.width / _DPI, drawing.height / _DPI), dpi=_DPI, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    alignment = {"start": "left", "middle": "center", "end": "right"}
    for order, shape in enumerate(drawing.shapes):
        match shape:
            case Rect():
                axes.add_patch(
                    Rectangle(
                        (shape.x, shape.y), shape.width, shape.height, color=shape.fill, linewidth=0, zorder=order
                    )
                )
            case Dot():
                axes.add_patch(Circle((shape.x, shape.y), shape.radius, color=shape.fill, linewidth=0, zorder=order))
            case Line():
                xs, ys = zip(*shape.points, strict=True)
                width = shape.width * 72 / _DPI
                axes.add_line(Line2D(xs, ys, color=shape.stroke, linewidth=width, zorder=order))
            case Text():
                axes.text(
                    shape.x,
                    shape.y,
                    shape.text,
                    fontsize=shape.size * 72 / _DPI,
                    ha=alignment[shape.anchor],
                    va="baseline",
                    color=shape.fill,
                    fontweight="bold" if shape.bold else "normal",
                    zorder=order,
                    parse_math=False,
                )
    figure.savefig(path)
