// The last steps: a strip in the colour of each plan, and below it a lane a slot. Prompts are solid, decoding is paler.

import { count, element, measure, setText } from "./format.js";
import { KINDS, colour, fitCanvas, kindName } from "./plans.js";

const KEPT_STEPS = 8000;
const STRIP = 26;
const AXIS = 20;
const LEFT = 34;
const DELAY_S = 0.15;
const TABLE_ROWS = 20;

export class Timeline {
  constructor() {
    this.canvas = document.getElementById("timeline");
    this.empty = document.getElementById("timeline-empty");
    this.facts = document.getElementById("step-facts");
    this.table = document.getElementById("steps-table");
    this.tableBox = document.getElementById("steps-as-table");
    this.pauseButton = document.getElementById("pause");
    this.steps = [];
    this.slots = 1;
    this.windowS = 5;
    this.offset = null;
    this.pausedAt = null;
    this.pointer = null;
    this.wasEmpty = false;
    this.makeLegend();
    document.getElementById("window").addEventListener("change", (event) => {
      this.windowS = Number(event.target.value);
      this.wasEmpty = false;
    });
    this.pauseButton.addEventListener("click", () => this.togglePause());
    this.canvas.addEventListener("pointermove", (event) => {
      this.pointer = event.offsetX;
      this.wasEmpty = false;
    });
    this.canvas.addEventListener("pointerleave", () => (this.pointer = null));
    this.tableBox.addEventListener("toggle", () => this.fillTable());
  }

  makeLegend() {
    this.counts = {};
    const items = KINDS.map((kind) => {
      this.counts[kind] = element("b", {}, "0");
      return element("li", { data: { kind } }, element("i"), kindName(kind), this.counts[kind]);
    });
    document.getElementById("legend").replaceChildren(...items);
  }

  togglePause() {
    this.pausedAt = this.pausedAt === null ? this.now() : null;
    this.pauseButton.setAttribute("aria-pressed", String(this.pausedAt !== null));
    this.wasEmpty = false;
  }

  // A report of the engine; its clock is mapped to ours by the quickest message seen.
  add(report) {
    const offset = performance.now() / 1000 - report.time;
    this.offset = this.offset === null || Math.abs(offset - this.offset) > 5 ? offset : Math.min(offset, this.offset + 1e-4);
    for (const [id, kind, start, end, tokens, width, mask, chunks] of report.steps) {
      this.steps.push({ id, kind, start, end, tokens, width, runs: runsOf(mask), chunks });
    }
    if (this.steps.length > KEPT_STEPS) this.steps.splice(0, this.steps.length - KEPT_STEPS);
    this.wasEmpty = false;
  }

  // An engine that starts again has other clocks and slots.
  reset(slots) {
    this.slots = Math.max(1, slots);
    this.steps = [];
    this.offset = null;
    this.wasEmpty = false;
  }

  now() {
    return performance.now() / 1000 - (this.offset ?? 0) - DELAY_S;
  }

  visible(low, high) {
    let first = this.steps.length;
    while (first > 0 && this.steps[first - 1].end > low) first -= 1;
    return this.steps.slice(first).filter((step) => step.start < high);
  }

  draw() {
    if (this.wasEmpty) return;
    const high = this.pausedAt ?? this.now();
    const low = high - this.windowS;
    const steps = this.offset === null ? [] : this.visible(low, high);
    this.empty.hidden = steps.length > 0;
    const { context, width, height } = fitCanvas(this.canvas);
    const x = (time) => LEFT + ((time - low) / (high - low)) * (width - LEFT);
    const bottom = height - AXIS;
    this.drawFrame(context, width, bottom, steps.length > 0);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, height);
    context.clip();
    for (const step of steps) this.drawStep(context, step, x, bottom);
    context.restore();
    this.describe(steps, x, context, bottom);
    this.wasEmpty = steps.length === 0 && this.pausedAt === null;
  }

  drawFrame(context, width, bottom, hasSteps) {
    context.fillStyle = colour("sunken");
    context.fillRect(LEFT, 0, width - LEFT, STRIP - 4);
    context.fillRect(LEFT, STRIP, width - LEFT, bottom - STRIP);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = colour("faint");
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillText("plan", LEFT - 7, STRIP / 2 - 2);
    const lane = (bottom - STRIP) / this.slots;
    const every = Math.max(1, Math.ceil(this.slots / 4));
    for (let slot = 0; slot < this.slots; slot += every) {
      context.fillText(String(slot), LEFT - 7, STRIP + lane * slot + Math.max(lane / 2, 6));
    }
    const ticks = this.windowS === 2 ? 4 : 5;
    for (let tick = 0; tick <= ticks; tick += 1) {
      const at = LEFT + ((width - LEFT) * tick) / ticks;
      context.fillStyle = colour("line");
      if (hasSteps) context.fillRect(Math.min(at, width - 1), STRIP, 1, bottom - STRIP);
      const ago = (this.windowS * (ticks - tick)) / ticks;
      context.fillStyle = colour("faint");
      context.textAlign = tick === 0 ? "left" : tick === ticks ? "right" : "center";
      context.fillText(ago ? `−${ago} s` : "now", at, bottom + AXIS / 2 + 2);
    }
  }

  drawStep(context, step, x, bottom) {
    const left = x(step.start);
    const wide = Math.max(0.75, x(step.end) - left - (x(step.end) - left > 3 ? 0.75 : 0));
    const lane = (bottom - STRIP) / this.slots;
    const gap = lane > 3 ? 1 : 0;
    context.fillStyle = colour(step.kind);
    if (step.kind !== "overlap_prefill") context.fillRect(left, 0, wide, STRIP - 4);
    else context.fillRect(left, STRIP - 9, wide, 5);
    context.globalAlpha = 0.6;
    for (const [slot, length] of step.runs) {
      context.fillRect(left, STRIP + lane * slot, wide, lane * length - gap);
    }
    context.globalAlpha = 1;
    for (const [slot] of step.chunks) context.fillRect(left, STRIP + lane * slot, wide, lane - gap);
  }

  describe(steps, x, context, bottom) {
    const seen = Object.fromEntries(KINDS.map((kind) => [kind, 0]));
    for (const step of steps) seen[step.kind] = (seen[step.kind] ?? 0) + 1;
    for (const kind of KINDS) setText(this.counts[kind], count(seen[kind]));
    let step = steps.at(-1);
    if (this.pointer !== null) {
      step = steps.find((one) => x(one.end) >= this.pointer && one.kind !== "overlap_prefill") ?? step;
      context.fillStyle = colour("ink");
      context.fillRect(this.pointer, 0, 1, bottom);
    }
    setText(this.facts, step ? sentence(step) : "\u00a0");
  }

  // For who cannot see the picture; called every few seconds.
  describeAloud() {
    const high = this.pausedAt ?? this.now();
    const steps = this.offset === null ? [] : this.visible(high - this.windowS, high);
    const last = steps.at(-1);
    const text = last
      ? `Timeline: ${steps.length} steps in ${this.windowS} seconds. ${sentence(last)}`
      : "Timeline of the last steps: nothing runs.";
    if (this.canvas.getAttribute("aria-label") !== text) this.canvas.setAttribute("aria-label", text);
    this.fillTable();
  }

  fillTable() {
    if (!this.tableBox.open || this.pausedAt !== null) return;
    const rows = this.steps.slice(-TABLE_ROWS).reverse().map((step) => {
      const cells = [step.id, kindName(step.kind), measure(1000 * (step.end - step.start)), count(step.tokens),
        count(decoding(step)), count(step.chunks.length)];
      return element("tr", {}, ...cells.map((cell) => element("td", {}, String(cell))));
    });
    if (rows.length) this.table.replaceChildren(...rows);
    else this.table.replaceChildren(element("tr", {}, element("td", { colSpan: 6 }, "No step has run since this page was opened.")));
  }
}

function decoding(step) {
  return step.runs.reduce((sum, [, length]) => sum + length, 0);
}

function sentence(step) {
  const prompts = step.chunks.reduce((sum, [, tokens]) => sum + tokens, 0);
  const parts = [`Step ${step.id}: ${kindName(step.kind)}, ${measure(1000 * (step.end - step.start))} ms`];
  if (step.runs.length) parts.push(`${decoding(step)} decoding`);
  if (step.chunks.length) parts.push(`${count(prompts)} prompt tokens of ${step.chunks.length}`);
  return parts.join(" · ");
}

// A hexadecimal mask of slots as [first, length] of neighbours, which are one rectangle.
export function runsOf(mask) {
  const runs = [];
  let start = -1;
  const last = mask.length * 4;
  for (let slot = 0; slot <= last; slot += 1) {
    const digit = slot < last ? parseInt(mask[mask.length - 1 - (slot >> 2)], 16) : 0;
    const isSet = (digit >> (slot & 3)) & 1;
    if (isSet && start < 0) start = slot;
    if (!isSet && start >= 0) {
      runs.push([start, slot - start]);
      start = -1;
    }
  }
  return runs;
}
