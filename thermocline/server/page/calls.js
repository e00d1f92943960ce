// Calls of functions: what the model asks for, and the results that a person gives. The page runs nothing.

import { button, copyButton, el } from "./dom.js";

/** Returns arguments as they are read best: JSON in lines, or the text if it is none. */
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

/** Adds what came of calls to those that are known: a call's name first, then its arguments in pieces. */
export function grow(calls, deltas) {
  for (const { index = 0, id, function: f = {} } of deltas) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= String(id ?? "");
    call.name += f.name ?? "";
    call.arguments += f.arguments ?? "";
  }
}

/** Reads functions as a person writes them: a list, or one. Throws, saying what is wrong. */
export function parseTools(text) {
  if (!text.trim()) return [];
  let given;
  try { given = JSON.parse(text); } catch (error) { throw new Error(`Not JSON: ${error.message}`); }
  return (Array.isArray(given) ? given : [given]).map((one, i) => {
    const f = one?.function ?? one;
    if (typeof f?.name !== "string" || !f.name) throw new Error(`Function ${i + 1} has no name.`);
    const { name, description, parameters, strict } = f;
    if (parameters !== undefined && (typeof parameters !== "object" || Array.isArray(parameters))) {
      throw new Error(`${name}: its parameters are no JSON schema.`);
    }
    return { type: "function", function: { name, description, parameters, strict } };
  });
}

export const EXAMPLE = [{
  name: "get_weather",
  description: "Look up the weather of a place.",
  parameters: {
    type: "object",
    properties: { place: { type: "string" }, unit: { enum: ["celsius", "fahrenheit"] } },
    required: ["place"],
  },
}];

/**
 * The calls of a message. `results`: texts by the calls' ids. `answer(texts)`: sends results, one for each
 * call in order; absent if none is awaited. Returns {node, show()}.
 */
export function callsView(message, results, answer) {
  const node = el("div", { className: "calls" });
  let shown = "";
  function show() {
    const calls = message.calls ?? [];
    const now = JSON.stringify(calls);
    if (now === shown) return;
    shown = now;
    const blocks = calls.map((call) => block(call, results.get(call.id), answer));
    node.replaceChildren(...blocks.map((b) => b.node));
    if (!answer || !blocks.length) return;
    const send = () => answer(blocks.map((b) => b.text()));
    const words = blocks.length === 1 ? "Send the result" : `Send ${blocks.length} results`;
    node.append(el("div", { className: "row end" },
      el("span", { className: "faint", textContent: "This page runs no functions: paste what they return." }),
      button(words, send, { className: "results" })));
  }
  show();
  return { node, show };
}

function block(call, result, answer) {
  const name = el("code", { textContent: call.name || "…" });
  const args = pretty(call.arguments);
  const copy = copyButton(`Copy the arguments of ${call.name}`, () => args);
  const parts = [
    el("div", { className: "head" }, el("span", { textContent: "Calls " }, name), copy),
    el("pre", { tabIndex: 0 }, el("code", { textContent: args })),
  ];
  let area = null;
  if (result !== undefined) {
    parts.push(el("details", { className: "result" }, el("summary", {}, "Result"),
      el("pre", { tabIndex: 0 }, el("code", { textContent: pretty(result) }))));
  } else if (answer) {
    area = el("textarea", { rows: 2, dir: "auto", "aria-label": `Result of ${call.name}`,
      placeholder: `What ${call.name} returned` });
    parts.push(area);
  } else {
    parts.push(el("p", { className: "faint", textContent: "No result was given." }));
  }
  return { node: el("div", { className: "call" }, ...parts), text: () => area?.value ?? "" };
}
