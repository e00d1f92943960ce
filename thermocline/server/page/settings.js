// Sampling settings and the theme, remembered by this browser; what a conversation has of its own.

import { EXAMPLE, parseTools } from "./calls.js";
import { $, icon } from "./dom.js";
import { remember, remembered } from "./history.js";

const NUMBERS = ["temperature", "top_k", "top_p", "min_p", "max_tokens", "seed"];
const EFFORTS = ["low", "medium", "high"];
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

/** Returns a request's fields. The server chooses those that are not set; the length is then unlimited. */
export function sampling() {
  const kept = remembered("settings", {});
  const known = NUMBERS.filter((name) => Number.isFinite(kept[name])).map((name) => [name, kept[name]]);
  return { max_tokens: -1, ...Object.fromEntries(known) };
}

/** Returns the fields that say how much a model thinks. Templates without such a switch ignore them. */
export function reasoning() {
  const kept = remembered("settings", {}).reasoning;
  if (kept === "off") return { chat_template_kwargs: { enable_thinking: false, thinking: false } };
  return EFFORTS.includes(kept) ? { reasoning_effort: kept } : {};
}

/** The dialog. `own` gets and sets what the conversation has of its own: {system, tools}. */
export function bindSettings(own) {
  const dialog = $("settings");
  const form = $("settings-form");
  const field = form.elements;
  const wrong = (text) => {
    $("settings-wrong").textContent = text;
    $("settings-wrong").hidden = !text;
    field.tools.setAttribute("aria-invalid", String(Boolean(text)));
  };
  $("open-settings").onclick = () => {
    const kept = remembered("settings", {});
    for (const name of NUMBERS) field[name].value = kept[name] ?? "";
    field.reasoning.value = ["off", ...EFFORTS].includes(kept.reasoning) ? kept.reasoning : "";
    const { system, tools } = own.get();
    field.system.value = system;
    field.tools.value = tools.length ? JSON.stringify(tools.map((t) => t.function), null, 2) : "";
    wrong("");
    dialog.showModal();
  };
  $("settings-cancel").onclick = () => dialog.close();
  $("tools-example").onclick = () => {
    field.tools.value = JSON.stringify(EXAMPLE, null, 2);
    wrong("");
  };
  form.onsubmit = (event) => {
    let tools;
    try {
      tools = parseTools(field.tools.value);
    } catch (error) {
      event.preventDefault();
      wrong(error.message);
      field.tools.focus();
      return;
    }
    const given = NUMBERS.filter((name) => field[name].value !== "");
    const numbers = Object.fromEntries(given.map((name) => [name, field[name].valueAsNumber]));
    remember("settings", { ...numbers, reasoning: field.reasoning.value });
    own.set({ system: field.system.value, tools });
  };
}

/** Shows the server's defaults as the fields' placeholders. */
export function showDefaults(params, chats) {
  for (const [name, value] of Object.entries(params)) {
    const field = $("settings-form").elements[name];
    if (field) field.placeholder = String(Math.round(value * 1e4) / 1e4);
  }
  for (const id of ["system-field", "tools-field", "reasoning-field"]) $(id).hidden = !chats;
}

export function bindTheme(changed) {
  const root = document.documentElement;
  const show = () => {
    const name = root.dataset.theme in THEMES ? root.dataset.theme : "auto";
    $("theme").replaceChildren(icon(name));
    $("theme").setAttribute("aria-label", `Theme: ${THEMES[name]}`);
    $("theme").title = `Theme: ${THEMES[name]}`;
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
