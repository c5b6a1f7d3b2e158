// The playground: one conversation, streamed; what each answer cost; the same request as curl.

import { count, element, measure, setText } from "./format.js";
import { KeyNeeded, events, hasKey, request } from "./requests.js";

const PATH = "v1/chat/completions";
const field = (name) => document.getElementById(name);

export class Chat {
  constructor(onKeyNeeded, onModel) {
    field("model").addEventListener("change", onModel);
    this.onKeyNeeded = onKeyNeeded;
    this.turns = [];
    this.connection = null;
    this.isReady = false;
    this.list = field("messages");
    this.empty = field("chat-empty");
    this.status = field("chat-status");
    this.prompt = field("prompt");
    field("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send(this.prompt.value);
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send(this.prompt.value);
      }
    });
    field("stop").addEventListener("click", () => this.connection?.abort());
    field("new-chat").addEventListener("click", () => this.clear());
    for (const idea of document.querySelectorAll(".idea")) {
      idea.addEventListener("click", () => this.send(idea.textContent));
    }
  }

  serve(models, isReady) {
    this.isReady = isReady;
    const names = models.map((model) => model.served_names[0]);
    const select = field("model");
    if ([...select.options].map((option) => option.value).join() !== names.join()) {
      select.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    }
    select.hidden = names.length < 2;
    this.showButtons();
  }

  get model() {
    return field("model").value;
  }

  showButtons() {
    field("send").hidden = this.connection !== null;
    field("send").disabled = !this.isReady;
    field("stop").hidden = this.connection === null;
    for (const idea of document.querySelectorAll(".idea")) idea.disabled = !this.isReady || this.connection !== null;
  }

  clear() {
    this.connection?.abort();
    this.turns = [];
    this.list.replaceChildren(this.empty);
    this.prompt.focus();
  }

  body() {
    const system = field("system").value.trim();
    const body = {
      model: this.model,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.turns],
      temperature: number("temperature") ?? 1,
      top_p: number("top-p") ?? 1,
      max_tokens: number("max-tokens") ?? 256,
      stream: true,
    };
    const seed = number("seed");
    return seed === null ? body : { ...body, seed };
  }

  async send(text) {
    if (!text.trim() || this.connection || !this.isReady) return;
    this.prompt.value = "";
    this.empty.remove();
    this.turns.push({ role: "user", content: text });
    this.list.append(element("article", { className: "message user" },
      element("p", { className: "who" }, "You"), element("p", { className: "text" }, text)));
    const body = this.body();
    const answer = new Answer(body, this.list);
    this.connection = new AbortController();
    const connection = this.connection;
    this.showButtons();
    field("stop").focus({ preventScroll: true });
    try {
      const response = await request(PATH, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ...body, stream_options: { include_usage: true }, return_token_ids: true }),
        signal: connection.signal,
      });
      for await (const { data } of events(response)) if (data !== "[DONE]") answer.event(JSON.parse(data));
      answer.end();
    } catch (error) {
      if (connection.signal.aborted) answer.end("stopped");
      else answer.fail(error.message);
      if (error instanceof KeyNeeded) this.onKeyNeeded(error.message);
    }
    if (answer.text) this.turns.push({ role: "assistant", content: answer.text });
    else this.turns.pop();
    this.connection = null;
    this.showButtons();
    setText(this.status, answer.summary());
    // Who typed may type on; on a touch screen that would bring the keyboard up, and who has scrolled away stays there.
    const isFree = document.activeElement === document.body || document.activeElement === field("stop");
    if (isFree && !matchMedia("(pointer: coarse)").matches) this.prompt.focus({ preventScroll: true });
  }
}

class Answer {
  constructor(body, list) {
    this.body = body;
    this.list = list;
    this.startedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
    this.tokens = 0;
    this.text = "";
    this.thoughts = "";
    this.reason = "";
    this.error = "";
    this.thought = element("p", { className: "thought", hidden: true });
    this.output = element("p", { className: "text" });
    this.facts = element("span", {}, "waiting for the first token");
    this.node = element("article", { className: "message answer", "aria-busy": "true" },
      element("p", { className: "who" }, body.model || "Answer"), this.thought, this.output,
      element("p", { className: "facts" }, this.facts));
    list.append(this.node);
    list.scrollTop = list.scrollHeight;
  }

  event(data) {
    if (data.error) throw new Error(data.error.message);
    const choice = data.choices?.[0];
    if (data.usage) this.tokens = data.usage.completion_tokens;
    if (!choice) return;
    const isAtEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 40;
    this.tokens += choice.token_ids?.length ?? 0;
    if (choice.token_ids?.length) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
    }
    this.text += choice.delta.content ?? "";
    this.thoughts += choice.delta.reasoning_content ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    this.thought.hidden = !this.thoughts;
    setText(this.thought, this.thoughts);
    setText(this.output, this.text);
    this.showFacts();
    if (isAtEnd) this.list.scrollTop = this.list.scrollHeight;
  }

  get speed() {
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return this.tokens > 1 && seconds > 0 ? (this.tokens - 1) / seconds : null;
  }

  showFacts() {
    const parts = [[count(this.tokens), this.tokens === 1 ? "token" : "tokens"]];
    if (this.speed !== null) parts.push([measure(this.speed), "tok/s"]);
    if (this.firstAt !== null) parts.push([measure(this.firstAt - this.startedAt), "ms to the first"]);
    if (this.reason) parts.push([this.reason, ""]);
    const nodes = parts.flatMap(([value, unit], place) => [place ? " · " : "", element("b", {}, value), unit ? ` ${unit}` : ""]);
    this.facts.replaceChildren(...nodes);
  }

  end(reason = "") {
    this.reason = reason || this.reason;
    this.node.setAttribute("aria-busy", "false");
    this.showFacts();
    this.facts.parentNode.append(copyButton("Copy as curl", () => curl(this.body)));
    if (this.text) this.facts.parentNode.append(copyButton("Copy text", () => this.text));
    this.list.scrollTop = this.list.scrollHeight;
  }

  fail(message) {
    this.error = message;
    this.end("failed");
    this.output.after(element("p", { className: "error" }, message));
    this.list.scrollTop = this.list.scrollHeight;
  }

  summary() {
    if (this.error) return `The request failed: ${this.error}`;
    return `Answer ${this.reason === "stopped" ? "stopped" : "complete"}: ${this.facts.textContent}`;
  }
}

function number(name) {
  const text = field(name).value.trim();
  return text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}

function copyButton(label, text) {
  const button = element("button", { type: "button", className: "quiet" }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      setText(button, "Copied");
    } catch {
      copyBySelection(text());
      setText(button, "Copied");
    }
    setTimeout(() => setText(button, label), 1500);
  });
  return button;
}

// Pages that come over plain HTTP from another machine have no clipboard API.
function copyBySelection(text) {
  const area = element("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

// The key itself stays out of it: a copied command ends up in histories and chats.
export function curl(body) {
  const lines = [`curl ${new URL(PATH, document.baseURI)}`, "-N", "-H 'Content-Type: application/json'"];
  if (hasKey()) lines.push('-H "Authorization: Bearer $WAVELANE_API_KEY"');
  lines.push(`-d '${JSON.stringify(body).replaceAll("'", `'\\''`)}'`);
  return lines.join(" \\\n  ");
}
