// The view of one message: its text, thoughts, calls and files, its buttons, its speed.

import { filesView } from "./attachments.js";
import { callsView } from "./calls.js";
import { button, copyButton, el } from "./dom.js";
import { render } from "./markdown.js";

const WHO = { user: "You", assistant: "Answer" };
const WHOSE = { user: "Your text", assistant: "Continuation" };
const ENDS = { length: "ended by the limit of tokens", stopped: "stopped", broken: "incomplete" };

/**
 * `plain`: text to be continued, shown unformatted. `growing`: more of it comes. `results`: of its calls, by
 * their ids. `actions`: {edit(text), regenerate(), results(texts)}, each optional.
 * Returns {node, show()}; call `show` whenever the message has grown.
 */
export function messageView(message, { plain, growing, results, actions }) {
  const body = el("div", { className: "body", ...(plain ? { dir: "auto" } : {}) });
  const inner = el("div");
  const summary = el("summary");
  const thought = el("details", { className: "thought", hidden: true }, summary, inner);
  const calls = callsView(message, results, actions.results);
  const waits = el("div", { className: "waits", role: "img", "aria-label": "The answer is on its way" });
  const note = el("span", { className: "faint" });
  const who = (plain ? WHOSE : WHO)[message.role];
  const tools = el("div", { className: "tools" }, copyButton(`Copy: ${who}`, () => message.content));
  const node = el("li", { className: `message ${message.role}${plain ? " plain" : ""}`, "aria-label": who },
    el("p", { className: "who", "aria-hidden": "true" }, who), thought, filesView(message), body, calls.node,
    waits, el("div", { className: "foot" }, note, tools));
  if (actions.edit) {
    const begin = () => editing(node, message, actions.edit);
    tools.append(button("Edit", begin, { className: "quiet small edit", "aria-label": `Edit: ${who}` }));
  }
  if (actions.regenerate) {
    const set = { className: "quiet small regenerate", "aria-label": "Answer again" };
    tools.append(button("Again", actions.regenerate, set));
  }
  function show() {
    if (plain) body.textContent = message.content;
    else render(body, message.content);
    body.hidden = !message.content;
    thought.hidden = !message.thought;
    summary.textContent = thoughtOf(message, growing);
    thought.classList.toggle("growing", Boolean(growing && !message.content));
    if (message.thought) render(inner, message.thought);
    calls.show();
    waits.hidden = !growing || Boolean(message.content || message.thought || message.calls?.length);
    tools.hidden = Boolean(growing);
    note.textContent = noteOf(message);
  }
  show();
  return { node, show };
}

function thoughtOf(message, growing) {
  if (growing && !message.content && !message.calls?.length) return "Thinking…";
  const s = message.thought_ms / 1000;
  return s >= 0.1 ? `Thought for ${s < 10 ? s.toFixed(1) : Math.round(s)} s` : "Thoughts";
}

function noteOf(message) {
  const words = message.model ? [message.model] : [];
  const t = message.timings;
  if (t?.predicted_n) words.push(`${t.predicted_n} ${t.predicted_n === 1 ? "token" : "tokens"}`);
  if (t?.predicted_per_second) words.push(`${Math.round(t.predicted_per_second * 10) / 10} tok/s`);
  if (Object.hasOwn(ENDS, message.finish ?? "")) words.push(ENDS[message.finish]);
  return words.join(" · ");
}

/** Shows the message's text in a field until it is sent or cancelled. */
function editing(node, message, send) {
  if (node.querySelector(".editor")) return;
  const rows = Math.min(12, message.content.split("\n").length + 1);
  const area = el("textarea", { value: message.content, rows, dir: "auto", "aria-label": "Edited message" });
  const close = () => {
    form.remove();
    node.classList.remove("editing");
    node.querySelector(".edit").focus();
  };
  const form = el("form", { className: "editor" }, area,
    el("div", { className: "row end" }, button("Cancel", close, { className: "quiet" }),
      el("button", { textContent: "Send" })));
  form.onsubmit = (event) => {
    event.preventDefault();
    if (area.value.trim() || message.files?.length) send(area.value);
  };
  form.onkeydown = (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      close();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  };
  node.classList.add("editing");
  node.append(form);
  area.focus();
}
