// A line chart of the last five minutes: two curves, a scale that moves in round steps, values under the pointer.

import { element, measure, setText } from "./format.js";
import { colour, fitCanvas } from "./plans.js";

const SPAN_S = 300;
const LEFT = 44;
const BOTTOM = 20;
const TOP = 8;

export class Chart {
  // `curves`: two of {field, name}; the first is drawn solid, the second dashed.
  constructor(title, unit, curves, emptyText) {
    this.curves = curves;
    this.unit = unit;
    this.title = title;
    this.points = [];
    this.top = 0;
    this.pointer = null;
    this.canvas = element("canvas", { role: "img", "aria-label": title });
    this.empty = element("p", { className: "empty over" }, emptyText);
    this.values = curves.map(() => element("b", {}, "–"));
    const keys = curves.map((curve, place) =>
      element("span", { className: place ? "second" : "first" }, element("i"), `${curve.name} `, this.values[place]),
    );
    this.node = element("section", { className: "card chart", "aria-label": title },
      element("div", { className: "head" }, element("h3", {}, title), element("p", { className: "sub" }, unit)),
      element("div", { className: "plot" }, this.canvas, this.empty),
      element("div", { className: "keys" }, ...keys),
    );
    this.canvas.addEventListener("pointermove", (event) => {
      this.pointer = event.offsetX;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(points) {
    this.points = points;
    this.draw();
  }

  draw() {
    const { context, width, height } = fitCanvas(this.canvas);
    const newest = this.points.at(-1)?.at ?? 0;
    const bottom = height - BOTTOM;
    const values = this.points.flatMap((point) => this.curves.map((curve) => point[curve.field])).filter((value) => value !== null);
    const highest = Math.max(0, ...values);
    this.empty.hidden = highest > 0;
    this.top = roundUp(highest);
    const x = (at) => LEFT + (1 - (newest - at) / SPAN_S) * (width - LEFT - 4);
    const y = (value) => bottom - (value / this.top) * (bottom - TOP);
    this.drawAxes(context, width, bottom, y);
    this.curves.forEach((curve, place) => this.drawCurve(context, curve, place, x, y));
    const shown = this.pointer === null ? this.points.at(-1) : this.nearest(x);
    if (this.pointer !== null && shown) {
      context.fillStyle = colour("ink");
      context.fillRect(x(shown.at), TOP, 1, bottom - TOP);
    }
    this.curves.forEach((curve, place) => setText(this.values[place], measure(shown?.[curve.field])));
  }

  nearest(x) {
    let best = null;
    for (const point of this.points) {
      if (!best || Math.abs(x(point.at) - this.pointer) < Math.abs(x(best.at) - this.pointer)) best = point;
    }
    return best;
  }

  drawAxes(context, width, bottom, y) {
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let tick = 0; tick <= 2; tick += 1) {
      const value = (this.top * tick) / 2;
      context.fillStyle = colour("line");
      context.fillRect(LEFT, Math.round(y(value)), width - LEFT, 1);
      context.fillStyle = colour("faint");
      context.textAlign = "right";
      context.fillText(label(value), LEFT - 7, y(value));
    }
    for (const minutes of width > 420 ? [0, 1, 2, 3, 4, 5] : [0, 2, 4]) {
      const at = LEFT + (1 - minutes / 5) * (width - LEFT - 4);
      context.fillStyle = colour("faint");
      context.textAlign = minutes === 0 ? "right" : minutes === 5 ? "left" : "center";
      context.fillText(minutes ? `−${minutes} min` : "now", minutes === 0 ? width : at, bottom + BOTTOM / 2 + 2);
    }
  }

  drawCurve(context, curve, place, x, y) {
    context.strokeStyle = colour(place ? "mixed" : "accent");
    context.fillStyle = context.strokeStyle;
    context.lineWidth = 2;
    context.lineJoin = "round";
    context.setLineDash(place ? [5, 4] : []);
    context.beginPath();
    let isDrawing = false;
    this.points.forEach((point, index) => {
      const value = point[curve.field];
      const isLone = value !== null && !isDrawing && (this.points[index + 1]?.[curve.field] ?? null) === null;
      if (value === null) isDrawing = false;
      else if (isLone) context.fillRect(x(point.at) - 1.5, y(value) - 1.5, 3, 3);
      else if (isDrawing) context.lineTo(x(point.at), y(value));
      else {
        context.moveTo(x(point.at), y(value));
        isDrawing = true;
      }
    });
    context.stroke();
    context.setLineDash([]);
  }

  describeAloud() {
    const last = this.points.at(-1);
    const parts = this.curves.map((curve) => `${curve.name} ${measure(last?.[curve.field])}`);
    this.canvas.setAttribute("aria-label", `${this.title} in ${this.unit}, now: ${parts.join(", ")}`);
  }
}

function label(value) {
  if (value >= 1000) return `${+(value / 1000).toPrecision(3)}k`;
  return String(+value.toPrecision(3));
}

// 1, 2 or 5 times a power of ten: the scale moves seldom.
function roundUp(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value);
}
