// Requests to this server: the API key where one is needed, and event streams through fetch, which can send it.

const STORED = "wavelane-key";
let key = sessionStorage.getItem(STORED) ?? "";

export class KeyNeeded extends Error {}

export function setKey(value) {
  key = value;
  if (value) sessionStorage.setItem(STORED, value);
  else sessionStorage.removeItem(STORED);
}

export function hasKey() {
  return key !== "";
}

export async function request(path, options = {}) {
  const headers = new Headers(options.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  let reason = `${response.status} ${response.statusText}`;
  try {
    reason = (await response.json()).error.message;
  } catch {
    // not an error object of ours: the status line says what is known
  }
  throw response.status === 401 ? new KeyNeeded(reason) : new Error(reason);
}

// Yields {name, data} of a stream of server-sent events, as this server writes them: one data line an event.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let name = "message";
      let data = "";
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data = line.slice(6);
      }
      if (data) yield { name, data };
    }
  }
}
