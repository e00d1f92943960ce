// The list of conversations: open, find, rename, delete, export, import.

import { $, button, download, el, iconButton } from "./dom.js";
import * as history from "./history.js";

const MANY = 8; // conversations from which on there is a field to find one
const MOST_IMPORTED = 64 * 1024 * 1024;

/** Calls `open(id)` and `remove(id)`, and `renamed(conversation)` after a change of name. */
export function bindShelf({ open, fresh, remove, renamed }) {
  $("new").onclick = () => {
    setDrawer(false);
    fresh();
  };
  $("export-all").onclick = () => save(history.all());
  $("import").onclick = () => $("imported").click();
  $("imported").onchange = async () => {
    const [file] = $("imported").files;
    $("imported").value = "";
    if (file) said(await importFrom(file));
    show(shown);
  };
  $("find").oninput = () => show(shown);
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
      tool("rename", `Rename: ${title}`, () => rename(item, conversation)),
      tool("export", `Export: ${title}`, () => save([conversation])),
      tool("remove", `Delete: ${title}`, () => askToDelete(conversation)),
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

  let shown = "";
  function show(currentId) {
    shown = currentId;
    if ($("conversations").querySelector("input")) return; // the user is typing a name there
    const known = history.all().filter((c) => c.messages.length || c.title);
    $("find").hidden = known.length < MANY && !$("find").value;
    const wanted = $("find").value.trim().toLowerCase();
    const fits = known.filter((c) => history.titleOf(c).toLowerCase().includes(wanted));
    $("conversations").replaceChildren(...fits.map((c) => entry(c, c.id === currentId)));
    $("export-all").hidden = !known.length;
  }
  return show;
}

function said(text) {
  $("shelf-said").textContent = text;
}

async function importFrom(file) {
  try {
    if (file.size > MOST_IMPORTED) throw new Error("it is larger than 64 MiB");
    const n = history.imported(await file.text());
    return n === 1 ? "Imported 1 conversation." : `Imported ${n} conversations.`;
  } catch (error) {
    return `${file.name.slice(0, 80)}: not imported, ${error.message}.`;
  }
}

function tool(name, label, onclick) {
  return iconButton(name, label, onclick, { className: "quiet small", title: label.split(":", 1)[0] });
}

function setDrawer(isOpen) {
  document.body.classList.toggle("shelf-open", isOpen);
  $("shade").hidden = !isOpen;
  $("open-shelf").setAttribute("aria-expanded", String(isOpen));
  if (!matchMedia("(max-width: 760px)").matches) return;
  (isOpen ? $("new") : $("open-shelf")).focus();
}

function save(conversations) {
  download("thermocline-conversations.json", history.exported(conversations));
}
