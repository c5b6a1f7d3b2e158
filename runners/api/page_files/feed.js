// The engine's telemetry, for as long as somebody looks: a hidden page lets go of it.

import { KeyNeeded, events, request } from "./requests.js";

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 8000;

export class Feed {
  // `handlers` has a function for each event of the stream, and `offline(reason)` and `keyNeeded(reason)`.
  constructor(handlers) {
    this.handlers = handlers;
    this.connection = null;
    this.waitMs = FIRST_WAIT_MS;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    if (this.connection || document.hidden) return;
    clearTimeout(this.timer);
    this.connection = new AbortController();
    this.run(this.connection);
  }

  stop() {
    clearTimeout(this.timer);
    this.connection?.abort();
    this.connection = null;
  }

  async run(connection) {
    let reason = "the server has ended the stream";
    try {
      const response = await request("telemetry", { signal: connection.signal });
      for await (const { name, data } of events(response)) {
        if (connection.signal.aborted) return;
        this.waitMs = FIRST_WAIT_MS;
        this.handlers[name]?.(JSON.parse(data));
      }
    } catch (error) {
      if (connection.signal.aborted) return;
      if (error instanceof KeyNeeded) {
        this.connection = null;
        this.handlers.keyNeeded(error.message);
        return;
      }
      reason = error.message;
    }
    if (connection.signal.aborted) return;
    this.connection = null;
    this.handlers.offline(reason);
    this.timer = setTimeout(() => this.start(), this.waitMs);
    this.waitMs = Math.min(LONGEST_WAIT_MS, 2 * this.waitMs);
  }
}
