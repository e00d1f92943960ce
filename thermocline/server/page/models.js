// Which model answers: its name where there is one, a choice where there are several.

import { models } from "./api.js";
import { $, el } from "./dom.js";
import { remember, remembered } from "./history.js";

const STATES = { loading: "loading…", unloaded: "not loaded", unloading: "making room…" };
const LOOK_EVERY_MS = 2000; // while one is loading or unloading

let known = []; // {id, state, progress}
let timer = 0;

export const several = () => known.length > 1;

/** Returns the chosen model, or null if there is none. */
export const current = () => known.find((m) => m.id === $("models").value) ?? null;

/** Asks the server for its models, and shows them. */
export async function refresh() {
  const found = await models();
  const chosen = current()?.id ?? remembered("model", ""); // only now: another one may be chosen meanwhile
  known = found;
  const options = known.map((m) => {
    const state = Object.hasOwn(STATES, m.state) ? ` (${STATES[m.state]})` : "";
    return el("option", { value: m.id, textContent: m.id + state });
  });
  $("models").replaceChildren(...options);
  // One that is loaded answers at once, and makes no other one go.
  const first = known.find((m) => m.id === chosen) ?? known.find((m) => m.state === "loaded") ?? known[0];
  $("models").value = first?.id ?? "";
  $("models").hidden = !several();
  $("model").hidden = several();
  $("model").textContent = $("model").title = known[0]?.id ?? "";
  clearTimeout(timer);
  if (known.some((m) => m.state.endsWith("loading"))) {
    timer = setTimeout(() => refresh().catch(() => {}), LOOK_EVERY_MS);
  }
}

/** `changed()`: another model was chosen. */
export function bindModels(changed) {
  $("models").onchange = () => {
    remember("model", $("models").value);
    changed();
  };
  // States may have changed since the list was shown, also through other clients.
  $("models").addEventListener("pointerdown", () => refreshIdle());
  window.addEventListener("focus", () => several() && refreshIdle());
}

/** Asks again, but not while the list is open: its options would be replaced under the pointer. */
function refreshIdle() {
  if (document.activeElement !== $("models")) refresh().catch(() => {});
}
