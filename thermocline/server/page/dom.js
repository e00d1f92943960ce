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
