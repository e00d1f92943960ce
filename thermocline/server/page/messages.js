// The view of one message: its text, its buttons, its speed.

import { button, copyButton, el } from "./dom.js";
import { render } from "./markdown.js";

const WHO = { user: "You", assistant: "Answer" };
const WHOSE = { user: "Your text", assistant: "Continuation" };

/**
 * `plain`: text to be continued, shown unformatted. `actions`: {edit(text), regenerate()}, each optional.
 * Returns {node, show()}; call `show` whenever the message has grown.
 */
export function messageView(message, { plain, actions }) {
  const body = el("div", { className: "body", ...(plain ? { dir: "auto" } : {}) });
  const inner = el("div");
  const thought = el("details", { className: "thought", hidden: true }, el("summary", {}, "Thoughts"), inner);
  const note = el("span", { className: "faint" });
  const who = (plain ? WHOSE : WHO)[message.role];
  const tools = el("div", { className: "tools" }, copyButton(`Copy: ${who}`, () => message.content));
  const node = el("li", { className: `message ${message.role}${plain ? " plain" : ""}`, "aria-label": who },
    el("p", { className: "who", "aria-hidden": "true" }, who), thought, body,
    el("div", { className: "foot" }, note, tools));
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
    thought.hidden = !message.thought;
    if (message.thought) render(inner, message.thought);
    note.textContent = noteOf(message);
  }
  show();
  return { node, show };
}

function noteOf(message) {
  const words = [];
  const t = message.timings;
  if (t?.predicted_n) words.push(`${t.predicted_n} ${t.predicted_n === 1 ? "token" : "tokens"}`);
  if (t?.predicted_per_second) words.push(`${Math.round(t.predicted_per_second * 10) / 10} tok/s`);
  if (message.finish === "length") words.push("ended by the limit of tokens");
  if (message.finish === "stopped") words.push("stopped");
  if (message.finish === "broken") words.push("incomplete");
  return words.join(" · ");
}

/** Shows the message's text in a field until it is sent or cancelled. */
function editing(node, message, send) {
  if (node.querySelector("form")) return;
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
    if (area.value.trim()) send(area.value);
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
