// Kinds of plan in the words and colours of the page. The order is that of the legend.

export const KINDS = ["wave", "chunk", "mixed", "decode", "sequential", "overlap_prefill", "embed"];
export const NAMES = { overlap_prefill: "overlap" };

export function kindName(kind) {
  return NAMES[kind] ?? kind;
}

let colours = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const names = [...KINDS, "ink", "faint", "line", "accent", "panel", "sunken"];
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

export function colour(name) {
  return colours[name] ?? colours.faint;
}

// Sharp lines on every screen: the canvas has the device's pixels, drawing goes on in those of the page.
export function fitCanvas(canvas) {
  const ratio = Math.min(3, window.devicePixelRatio || 1);
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
