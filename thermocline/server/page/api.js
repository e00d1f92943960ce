// The page's requests to its server: HTTP and events.

const KEY = "thermocline.key"; // in sessionStorage, which ends with the tab

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status; // 0: no answer
  }
}

let keyHere = ""; // used if there is no storage
export function useKey(key) {
  keyHere = key;
  try { sessionStorage.setItem(KEY, key); } catch { /* this page remembers it */ }
}

function headers(more) {
  let key = keyHere;
  try { key = sessionStorage.getItem(KEY) ?? keyHere; } catch { /* as above */ }
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

async function ask(path, { body, signal, refused = true } = {}) {
  const options = { signal, headers: headers({}), cache: "no-store" };
  if (body !== undefined) {
    options.method = "POST";
    options.headers = headers({ "Content-Type": "application/json" });
    options.body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
  if (!response.ok && refused) throw new ApiError(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const said = (await response.json()).error.message;
    if (typeof said === "string" && said) return said;
  } catch { /* no JSON: the status has to do */ }
  return `The server answered ${response.status} ${response.statusText}`.trim();
}

/** Returns {status: "ok"}, or while the model loads {error, progress?}. */
export async function health() {
  return (await ask("/health", { refused: false })).json();
}

/**
 * Returns the models that can be had, [{id, state, progress}].
 * `state`: loaded, loading, unloaded or unloading. `progress`: {what, done, size} of loading, or null.
 */
export async function models() {
  const { data } = await (await ask("/v1/models")).json();
  return data.map((m) => ({
    id: String(m.id),
    state: String(m.status.value),
    progress: m.status.progress ?? null,
  }));
}

/** Returns what the server says of a model. It is loaded for that if need be. */
export async function props(model, signal) {
  return (await ask(`/props?model=${encodeURIComponent(model)}`, { signal })).json();
}

/** Measures what bounds the machine. Takes some seconds; refused while an answer is computed. */
export async function benchmark(model, signal) {
  return (await ask("/benchmark", { body: { model }, signal })).json();
}

/** Parses server-sent events from text that may be split anywhere; returns the data of whole events. */
export class EventParser {
  #line = "";
  #data = null;
  #afterReturn = false; // a \n that comes next belongs to the \r before it

  push(text) {
    const events = [];
    let begin = 0;
    for (let i = 0; i < text.length; i++) {
      const c = text[i];
      if (c !== "\n" && c !== "\r") {
        this.#afterReturn = false;
        continue;
      }
      if (!(c === "\n" && this.#afterReturn)) this.#end(this.#line + text.slice(begin, i), events);
      this.#afterReturn = c === "\r";
      this.#line = "";
      begin = i + 1;
    }
    this.#line += text.slice(begin);
    return events;
  }

  #end(line, events) {
    if (line === "") {
      if (this.#data !== null) events.push(this.#data);
      this.#data = null;
    } else if (line === "data" || line.startsWith("data:")) {
      const value = line.slice(5).replace(/^ /, "");
      this.#data = this.#data === null ? value : `${this.#data}\n${value}`;
    }
  }
}

/** Yields the data of each event of a response, as it comes. */
async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder(); // holds back incomplete characters
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Yields reports of the activity of a model's layers until `signal`. */
export async function* activity(model, signal) {
  const response = await ask(`/activity?model=${encodeURIComponent(model)}`, { signal });
  for await (const data of eventsOf(response)) yield JSON.parse(data);
}

/** Yields an answer as it grows: {text, thought, calls, finish, timings}, each as far as it has come. */
export async function* generate(path, body, signal) {
  const response = await ask(path, { body: { ...body, stream: true }, signal });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.code, event.error.message);
    const choice = event.choices?.[0];
    if (!choice) continue;
    yield {
      text: choice.text ?? choice.delta?.content ?? "",
      thought: choice.delta?.reasoning_content ?? "",
      calls: choice.delta?.tool_calls ?? [],
      finish: choice.finish_reason ?? null,
      timings: event.timings ?? null,
    };
  }
  throw new ApiError(0, "The connection was lost during the answer.");
}
