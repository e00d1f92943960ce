// Sampling settings and the theme, remembered by this browser.

import { $ } from "./dom.js";
import { remember, remembered } from "./history.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const THEMES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

/** Returns a request's fields. The server chooses those that are not set; the length is then unlimited. */
export function sampling() {
  const kept = remembered("settings", {});
  const known = NUMBERS.filter((name) => Number.isFinite(kept[name])).map((name) => [name, kept[name]]);
  return { max_tokens: -1, ...Object.fromEntries(known) };
}

/** The dialog. `system` reads and writes the conversation's system prompt. */
export function bindSettings(system) {
  const dialog = $("settings");
  const form = $("settings-form");
  $("open-settings").onclick = () => {
    const kept = remembered("settings", {});
    for (const name of NUMBERS) form.elements[name].value = kept[name] ?? "";
    form.elements.system.value = system.get();
    dialog.showModal();
  };
  $("settings-cancel").onclick = () => dialog.close();
  form.onsubmit = () => {
    const given = NUMBERS.filter((name) => form.elements[name].value !== "");
    remember("settings", Object.fromEntries(given.map((name) => [name, form.elements[name].valueAsNumber])));
    system.set(form.elements.system.value);
  };
}

/** Shows the server's defaults as the fields' placeholders. */
export function showDefaults(params, chats) {
  for (const [name, value] of Object.entries(params)) {
    const field = $("settings-form").elements[name];
    if (field) field.placeholder = String(Math.round(value * 1e4) / 1e4);
  }
  $("system-field").hidden = !chats;
}

export function bindTheme(changed) {
  const root = document.documentElement;
  const show = () => {
    const name = root.dataset.theme in THEMES ? root.dataset.theme : "auto";
    const [sign, words] = THEMES[name];
    $("theme").textContent = sign;
    $("theme").setAttribute("aria-label", `Theme: ${words}`);
    $("theme").title = `Theme: ${words}`;
    changed();
  };
  $("theme").onclick = () => {
    const names = Object.keys(THEMES);
    root.dataset.theme = names[(names.indexOf(root.dataset.theme) + 1) % names.length];
    try { localStorage.setItem("thermocline.theme", root.dataset.theme); } catch { /* this time only */ }
    show();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
