// DOM nodes without markup: text always stays text.

export const $ = (id) => document.getElementById(id);

/** Makes an element. `set`: properties (className, ...); `role` and names with a dash are attributes. */
export function el(tag, set = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(set)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

export function button(text, onclick, set = {}) {
  return el("button", { type: "button", textContent: text, onclick, ...set });
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = { // strokes in a square of 24
  new: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  close: "M6 6l12 12M18 6L6 18",
  settings: "M4 8h10M18 8h2M16 6v4M4 16h2M10 16h10M8 14v4",
  gauge: "M5 18a9 9 0 1 1 14 0M12 14l4-5",
  attach: "M20 11l-8.5 8.5a5 5 0 0 1-7-7L13 4a3.3 3.3 0 0 1 4.7 4.7l-8.5 8.4a1.6 1.6 0 0 1-2.3-2.3L14.5 7.5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  down: "M12 5v14M6 13l6 6 6-6",
  rename: "M4 20l1-4L16 5l3 3L8 19zM13 8l3 3",
  export: "M12 4v11M7 11l5 5 5-5M5 20h14",
  import: "M12 16V5M7 9l5-5 5 5M5 20h14",
  remove: "M5 7h14M9 7V4h6v3M7 7l1 13h8l1-13",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M5 19l2-2"
    + "M17 7l2-2",
  dark: "M19 14.5A8 8 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
};

/** Makes a picture for a button, whose name is said elsewhere. */
export function icon(name) {
  const made = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  for (const [key, value] of [["viewBox", "0 0 24 24"], ["class", "icon"], ["aria-hidden", "true"]]) {
    made.setAttribute(key, value);
  }
  path.setAttribute("d", ICONS[name]);
  made.append(path);
  return made;
}

export function iconButton(name, label, onclick, set = {}) {
  const made = button("", onclick, { className: "quiet round", "aria-label": label, title: label, ...set });
  made.append(icon(name));
  return made;
}

/** Puts pictures into the buttons of the page's own HTML. */
export function bindIcons() {
  for (const node of document.querySelectorAll("[data-icon]")) node.prepend(icon(node.dataset.icon));
}

/** Copies to the clipboard; without a secure context (http on another machine) by a selection. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea", { value: text, className: "unseen", readOnly: true });
  const before = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  if (!done) throw new Error("this browser does not let the page copy");
}

/** Makes a button that copies and confirms it. */
export function copyButton(label, text, set = {}) {
  const made = button("Copy", async () => {
    try {
      await copy(text());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not allowed";
    }
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  }, { className: "quiet small", "aria-label": label, ...set });
  return made;
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** Returns a size as people read it. */
export function bytes(n) {
  if (n < 1024) return `${n} B`;
  return n < 1024 * 1024 ? `${(n / 1024).toFixed(n < 10240 ? 1 : 0)} KiB` : `${(n / 1048576).toFixed(1)} MiB`;
}
