// Text files beside a message: chosen, dropped or pasted, read here, and sent as part of the message's text.

import { $, bytes, button, el, iconButton } from "./dom.js";

const MOST_FILES = 16; // in a message
const MOST_BYTES = 512 * 1024; // of a file; all conversations of a browser together have some 5 MB
const MOST_TOGETHER = 1024 * 1024;
const CONTROL = /[\0-\x08\x0e-\x1a\x1c-\x1f]/; // characters that text does not have; logs may have ESC

let files = []; // {name, text, size}

/** Returns a file's text; throws, saying why, if it is none. */
async function textOf(file) {
  if (file.size > MOST_BYTES) throw new Error(`has ${bytes(file.size)}; at most ${bytes(MOST_BYTES)} fit`);
  const data = new Uint8Array(await file.arrayBuffer());
  const wide = { "255,254": "utf-16le", "254,255": "utf-16be" }[data.slice(0, 2).join()];
  let found;
  try {
    found = new TextDecoder(wide ?? "utf-8", { fatal: true }).decode(data);
  } catch {
    throw new Error("is not a text file");
  }
  if (CONTROL.test(found)) throw new Error("is not a text file");
  return found;
}

/** Adds files to the message that is being written, and says of each that cannot be added why. */
async function add(given, refused) {
  const whys = [];
  for (const file of given) {
    const together = files.reduce((sum, f) => sum + f.size, file.size);
    try {
      if (files.length >= MOST_FILES) throw new Error(`is one too many; a message takes ${MOST_FILES}`);
      const text = await textOf(file);
      if (together > MOST_TOGETHER) throw new Error(`is too much; a message takes ${bytes(MOST_TOGETHER)}`);
      files.push({ name: file.name.slice(0, 200) || "file", text, size: file.size });
    } catch (error) {
      whys.push(`${file.name.slice(0, 80)} ${error.message || "cannot be read"}.`);
    }
  }
  show();
  refused(whys.length ? whys.join(" ") : null);
  $("input").focus();
}

function show() {
  $("files").hidden = !files.length;
  $("files").replaceChildren(...files.map((file, i) => {
    const remove = () => {
      files.splice(i, 1);
      show();
      $("input").focus();
    };
    return el("li", { className: "chip" },
      el("span", { textContent: file.name, title: file.name, dir: "auto" }),
      el("span", { className: "faint", textContent: bytes(file.size) }),
      iconButton("close", `Remove ${file.name}`, remove));
  }));
}

/** Returns the files of the message that is sent now, and forgets them. */
export function taken() {
  const now = files.map(({ name, text }) => ({ name, text }));
  files = [];
  show();
  return now;
}

export const some = () => files.length > 0;

/** Returns what the model is given: each file in a fence that its text does not close, then the message. */
export function composed(message) {
  const parts = (message.files ?? []).map(({ name, text }) => {
    const longest = Math.max(0, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(Math.max(3, longest + 1));
    return `File ${JSON.stringify(name)}:\n${fence}\n${text.replace(/\n?$/, "\n")}${fence}\n`;
  });
  return [...parts, message.content].join("\n");
}

/** The files of a message that was sent, each of which can be opened. */
export function filesView(message) {
  const open = (file) => {
    $("file-title").textContent = file.name;
    $("file-text").textContent = file.text;
    $("file").showModal();
  };
  const made = (message.files ?? []).map((file) => {
    const set = { className: "chip", dir: "auto", "aria-label": `Show ${file.name}` };
    return button(file.name, () => open(file), set);
  });
  return el("div", { className: "files" }, ...made);
}

/** `ready()`: whether files can be taken now. `refused(why)`: says so, or null. */
export function bindAttachments({ ready, refused }) {
  const take = (given) => add([...given], refused);
  $("attach").onclick = () => $("attached").click();
  $("attached").onchange = () => {
    take($("attached").files);
    $("attached").value = "";
  };
  const holds = (event) => ready() && event.dataTransfer?.types.includes("Files");
  let inside = 0; // dragenter and dragleave come for each element
  const over = (on) => {
    inside = on ? inside + 1 : Math.max(0, inside - 1);
    $("drop").hidden = inside === 0;
  };
  const main = document.querySelector("main");
  main.addEventListener("dragenter", (event) => holds(event) && over(true));
  main.addEventListener("dragleave", (event) => holds(event) && over(false));
  // A file that is dropped anywhere would otherwise take the page's place.
  window.addEventListener("dragover", (event) => event.preventDefault());
  window.addEventListener("drop", (event) => {
    event.preventDefault();
    inside = 0;
    $("drop").hidden = true;
    if (holds(event)) take(event.dataTransfer.files);
  });
  $("input").addEventListener("paste", (event) => {
    if (!ready() || !event.clipboardData?.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
}
