// The list of conversations: open, rename, delete, export.

import { $, button, download, el } from "./dom.js";
import * as history from "./history.js";

/** Calls `open(id)` and `remove(id)`, and `renamed(conversation)` after a change of name. */
export function bindShelf({ open, fresh, remove, renamed }) {
  $("new").onclick = () => {
    setDrawer(false);
    fresh();
  };
  $("export-all").onclick = () => save(history.all());
  $("open-shelf").onclick = () => setDrawer(true);
  $("close-shelf").onclick = () => setDrawer(false);
  $("shade").onclick = () => setDrawer(false);
  $("shelf").onkeydown = (event) => {
    if (event.key === "Escape" && !event.target.matches("input")) setDrawer(false);
  };

  function entry(conversation, current) {
    const title = history.titleOf(conversation);
    const item = el("li", { className: current ? "current" : "" });
    const set = { className: "open", dir: "auto", title, ...(current ? { "aria-current": "true" } : {}) };
    item.append(
      button(title, () => { setDrawer(false); open(conversation.id); }, set),
      tool("✎", `Rename: ${title}`, () => rename(item, conversation)),
      tool("↓", `Export: ${title}`, () => save([conversation])),
      tool("✕", `Delete: ${title}`, () => askToDelete(conversation)),
    );
    return item;
  }

  function rename(item, conversation) {
    const value = history.titleOf(conversation);
    const field = el("input", { value, maxLength: 120, "aria-label": "New name" });
    let over = false;
    const finish = (kept) => {
      if (over) return;
      over = true;
      field.remove();
      if (kept && field.value.trim()) {
        const now = history.load(conversation.id) ?? conversation;
        now.title = field.value.trim();
        history.save(now);
        renamed(now);
      } else {
        renamed(null);
      }
    };
    field.onkeydown = (event) => {
      if (event.key === "Enter" && !event.isComposing) finish(true);
      else if (event.key === "Escape") finish(false);
    };
    field.onblur = () => finish(true);
    item.replaceChildren(field);
    field.select();
  }

  function askToDelete(conversation) {
    const title = history.titleOf(conversation);
    $("confirm-text").textContent = `Delete “${title}”? It cannot be brought back.`;
    $("confirm").returnValue = "";
    $("confirm").onclose = () => {
      if ($("confirm").returnValue === "yes") remove(conversation.id);
    };
    $("confirm").showModal();
  }

  return function show(currentId) {
    if ($("conversations").querySelector("input")) return; // the user is typing a name there
    const known = history.all().filter((c) => c.messages.length || c.title);
    $("conversations").replaceChildren(...known.map((c) => entry(c, c.id === currentId)));
    $("export-all").hidden = !known.length;
  };
}

function tool(sign, label, onclick) {
  const title = label.split(":", 1)[0];
  return button(sign, onclick, { className: "quiet small", "aria-label": label, title });
}

function setDrawer(isOpen) {
  document.body.classList.toggle("shelf-open", isOpen);
  $("shade").hidden = !isOpen;
  $("open-shelf").setAttribute("aria-expanded", String(isOpen));
  if (!matchMedia("(max-width: 760px)").matches) return;
  (isOpen ? $("new") : $("open-shelf")).focus();
}

function save(conversations) {
  const made = { format: "thermocline-conversations", version: 1, conversations };
  download("thermocline-conversations.json", JSON.stringify(made, null, 1));
}
