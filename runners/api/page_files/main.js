// Puts the page together: the feed's messages go to the views, one loop draws what moves.

import { Chat } from "./chat.js";
import { EngineView } from "./engine.js";
import { Feed } from "./feed.js";
import { element, setText } from "./format.js";
import { readColours } from "./plans.js";
import { ProfileView } from "./profile.js";
import { setKey } from "./requests.js";
import { Timeline } from "./timeline.js";

const FRAME_MS = 50;
const CALM_FRAME_MS = 500;
const ALOUD_MS = 5000;

readColours();
const timeline = new Timeline();
const engine = new EngineView();
const profile = new ProfileView();
const chat = new Chat(askForKey, showModel);
const dialog = document.getElementById("key-dialog");
let models = [];
let lastOpening = null;

const feed = new Feed({
  opening(opening) {
    models = opening.models;
    lastOpening = opening;
    hideNotice();
    showState(opening.state);
    showModel();
    profile.show(opening.profile);
  },
  second(message) {
    showState(message.state);
    lastOpening.points = engine.points;
    engine.second(message);
  },
  steps(report) {
    // Of several models in one engine, one is shown: the one that the playground talks to.
    if (!shownModel()?.served_names.includes(report.model)) return;
    timeline.add(report);
    engine.steps(report);
  },
  offline(reason) {
    showPhase("offline", "offline");
    chat.serve(models, false);
    showNotice(`No connection to the server (${reason}). Trying again.`);
  },
  keyNeeded: askForKey,
});

function shownModel() {
  return models.find((model) => model.served_names.includes(chat.model)) ?? models[0] ?? null;
}

function showModel() {
  const model = shownModel();
  const served = document.getElementById("served");
  if (model) {
    const facts = [model.quantization === "none" ? model.dtype : model.quantization, model.device, `${model.executor} executor`,
      `${lastOpening.profile.name} profile`].filter((fact) => fact !== "none");
    served.replaceChildren(element("b", {}, model.served_names.join(", ")), ` · ${facts.join(" · ")}`);
  } else served.replaceChildren();
  timeline.reset(model?.slots ?? 1);
  engine.open(lastOpening, model);
}

function showState(state) {
  const progress = state.fraction === null ? "" : ` ${Math.round(100 * state.fraction)} %`;
  showPhase(state.phase, state.phase + progress);
  chat.serve(models, state.phase === "ready");
  if (state.phase === "failed" || state.phase === "restarting") showNotice(state.detail || `The engine is ${state.phase}.`);
  else if (state.phase !== "ready" && state.detail) showPhase(state.phase, `${state.detail}${progress}`);
  if (state.phase === "ready") hideNotice();
}

function showPhase(phase, text) {
  document.getElementById("phase").dataset.phase = phase;
  setText(document.getElementById("phase-text"), text);
}

function showNotice(text) {
  const notice = document.getElementById("notice");
  notice.hidden = false;
  setText(notice, text);
}

function hideNotice() {
  document.getElementById("notice").hidden = true;
}

function askForKey(reason) {
  showPhase("locked", "needs a key");
  setText(document.getElementById("key-reason"), `${reason} It stays in this tab and is forgotten when you close it.`);
  if (!dialog.open) dialog.showModal();
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = document.getElementById("key");
  setKey(input.value.trim());
  input.value = "";
  dialog.close();
  feed.stop();
  feed.start();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  timeline.wasEmpty = false;
  engine.redraw();
});
new ResizeObserver(() => (timeline.wasEmpty = false)).observe(timeline.canvas);

const calm = matchMedia("(prefers-reduced-motion: reduce)");
let lastFrame = 0;
function frame(now) {
  if (now - lastFrame >= (calm.matches ? CALM_FRAME_MS : FRAME_MS)) {
    lastFrame = now;
    timeline.draw();
  }
  requestAnimationFrame(frame);
}
requestAnimationFrame(frame);
setInterval(() => {
  timeline.describeAloud();
  engine.describeAloud();
}, ALOUD_MS);
feed.start();
