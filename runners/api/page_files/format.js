// Numbers as people read them; every figure keeps its width while it changes.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const two = new Intl.NumberFormat("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export const NOTHING = "–";

export function count(value) {
  return whole.format(value);
}

// Three significant digits, more or less: 4.82, 48.2, 482.
export function measure(value) {
  if (value === null || value === undefined) return NOTHING;
  if (value === 0 || value >= 100) return whole.format(value);
  return value >= 10 ? one.format(value) : two.format(value);
}

export function percent(part, total) {
  return total > 0 ? one.format((100 * part) / total) : NOTHING;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${place ? measure(value) : whole.format(value)} ${units[place]}`;
}

export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "data") Object.assign(made.dataset, value);
    else if (key in made) made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

// Writes only what has changed: a text node that is set anew costs layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
