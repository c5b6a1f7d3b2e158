// The engine's figures: tiles, slots, KV pool, curves.

import { Chart } from "./chart.js";
import { NOTHING, bytes, count, element, measure, percent, setText } from "./format.js";

const TILES = [
  ["output", "Output", "tok/s"],
  ["prompt", "Prompts", "tok/s"],
  ["running", "Running", ""],
  ["waiting", "Waiting", ""],
  ["kv", "KV pool", "% in use"],
  ["hits", "Prefix hits", "% of prompts"],
  ["ttft", "First token", "ms p50"],
  ["itl", "Between tokens", "ms p50"],
];
const KV_FACTS = ["In use", "Cached", "Free", "Prompt tokens hit", "Preemptions", "Evictions"];
const MANY_SLOTS = 128;
const KEPT_POINTS = 300;

export class EngineView {
  constructor() {
    this.tiles = {};
    this.units = {};
    const tiles = TILES.map(([name, title, unit]) => {
      this.tiles[name] = element("span", { className: "value" }, NOTHING);
      this.units[name] = element("span", { className: "unit" }, unit);
      return element("div", {}, element("dt", {}, title), element("dd", {}, this.tiles[name], this.units[name]));
    });
    document.getElementById("tiles").replaceChildren(...tiles);
    this.kvFacts = KV_FACTS.map((name) => {
      const value = element("dd", {}, NOTHING);
      return { value, node: element("div", {}, element("dt", {}, name), value) };
    });
    document.getElementById("kv-facts").replaceChildren(...this.kvFacts.map((fact) => fact.node));
    const nothing = "Nothing to measure yet: send a request.";
    this.charts = [
      new Chart("Time to first token", "ms, over 5 s", [{ field: "ttft_p50", name: "p50" }, { field: "ttft_p99", name: "p99" }], nothing),
      new Chart("Between tokens", "ms, over 5 s", [{ field: "itl_p50", name: "p50" }, { field: "itl_p99", name: "p99" }], nothing),
      new Chart("Token rate", "tokens a second", [{ field: "output_rate", name: "output" }, { field: "prompt_rate", name: "prompts" }], nothing),
    ];
    document.getElementById("charts").replaceChildren(...this.charts.map((chart) => chart.node));
    this.slotList = document.getElementById("slots");
    this.slotCounts = ["decode", "prefill", "free"].map((name) => document.getElementById(`slots-${name}`));
    this.cells = [];
    this.points = [];
    this.cachedBlocks = 0;
    this.model = null;
  }

  open(opening, model) {
    this.model = model;
    this.points = opening.points;
    this.charts.forEach((chart) => chart.show(this.points));
    this.makeSlots(this.model?.slots ?? 0);
    setText(document.getElementById("kv-size"),
      model ? `${model.kv_bytes ? `${bytes(model.kv_bytes)}: ` : ""}${count(model.total_blocks)} blocks of ${model.block_tokens} tokens` : "");
    this.showStats(opening.stats);
    this.showSlots([]);
    if (this.points.length) this.showPoint(this.points.at(-1));
  }

  makeSlots(number) {
    this.slotList.classList.toggle("many", number > MANY_SLOTS);
    this.cells = Array.from({ length: number }, (_, slot) => {
      const tokens = element("b", {}, "");
      const bar = element("i");
      return { node: element("li", {}, element("span", {}, String(slot)), tokens, bar), tokens, bar };
    });
    this.slotList.replaceChildren(...this.cells.map((cell) => cell.node));
  }

  second(message) {
    this.points.push(message.point);
    if (this.points.length > KEPT_POINTS) this.points.shift();
    this.charts.forEach((chart) => chart.show(this.points));
    this.showPoint(message.point);
    this.showStats(message.stats);
    if (!(message.stats.running > 0)) this.showSlots([]);
  }

  steps(report) {
    this.cachedBlocks = report.cached_blocks;
    this.showStats(report.stats);
    this.showSlots(report.slots);
  }

  showPoint(point) {
    setText(this.tiles.output, measure(point.output_rate));
    setText(this.tiles.prompt, measure(point.prompt_rate));
    setText(this.tiles.ttft, measure(point.ttft_p50));
    setText(this.tiles.itl, measure(point.itl_p50));
  }

  // Fields that are zero are not sent.
  showStats(stats) {
    const { running = 0, waiting = 0, free_blocks: free = 0, total_blocks: total = 0 } = stats;
    const { prompt_tokens: prompts = 0, cached_tokens: hits = 0, queued_tokens: queued = 0 } = stats;
    const used = total - free;
    const cached = Math.min(this.cachedBlocks, free);
    setText(this.tiles.running, count(running));
    setText(this.units.running, this.model ? `of ${count(this.model.slots)}` : "");
    setText(this.tiles.waiting, count(waiting));
    setText(this.units.waiting, queued ? `${count(queued)} tok` : "");
    setText(this.tiles.kv, percent(used, total));
    setText(this.tiles.hits, percent(hits, prompts));
    document.getElementById("kv-used").style.width = `${total ? (100 * used) / total : 0}%`;
    document.getElementById("kv-cached").style.width = `${total ? (100 * cached) / total : 0}%`;
    const facts = [`${count(used)} blocks`, `${count(cached)} blocks`, `${count(free - cached)} blocks`,
      `${count(hits)} / ${count(prompts)}`, count(stats.preemptions ?? 0), count(stats.evictions ?? 0)];
    facts.forEach((text, place) => setText(this.kvFacts[place].value, text));
  }

  showSlots(facts) {
    const busy = new Map(facts.map((fact) => [fact[0], fact]));
    let decoding = 0;
    this.cells.forEach((cell, slot) => {
      const fact = busy.get(slot);
      if (!fact) {
        if (cell.node.dataset.does) {
          delete cell.node.dataset.does;
          cell.node.style.removeProperty("--done");
          setText(cell.tokens, "");
          cell.node.title = "";
        }
        return;
      }
      const [, decodes, prompt, computed, generated, limit] = fact;
      decoding += decodes ? 1 : 0;
      const does = decodes ? "decode" : "prefill";
      if (cell.node.dataset.does !== does) cell.node.dataset.does = does;
      const [done, total] = decodes ? [generated, limit] : [computed, prompt];
      setText(cell.tokens, count(done));
      cell.node.style.setProperty("--done", String(total ? Math.min(1, done / total) : 0));
      cell.node.title = `Slot ${slot}: ${does}, ${done} of ${total} tokens`;
    });
    const counts = [decoding, busy.size - decoding, this.cells.length - busy.size];
    counts.forEach((value, place) => setText(this.slotCounts[place], this.cells.length ? count(value) : NOTHING));
  }

  describeAloud() {
    this.charts.forEach((chart) => chart.describeAloud());
  }

  redraw() {
    this.charts.forEach((chart) => chart.draw());
  }
}
