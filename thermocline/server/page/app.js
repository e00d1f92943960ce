// The page: it shows one conversation and computes one answer at a time.

import { ApiError, generate, health, props, useKey } from "./api.js";
import { $ } from "./dom.js";
import * as history from "./history.js";
import { messageView } from "./messages.js";
import { bindSettings, bindTheme, sampling, showDefaults } from "./settings.js";
import { bindShelf } from "./shelf.js";
import * as strip from "./strip.js";

const SAVE_EVERY_MS = 1000;
const POLL_MS = 500;

let model = null; // from /props, once the model is loaded
let conversation = history.load(history.remembered("open", "")) ?? history.create();
let view = null; // the view of the growing answer
let running = null; // its AbortController

// ---- loading

/** Returns whether the server is ready. It may have been restarted with another model. */
async function begin() {
  notice(null);
  model = null;
  $("send").disabled = true;
  for (;;) {
    try {
      const state = await health();
      if (state.status === "ok") break;
      loading(state);
    } catch (error) {
      loading({ error: { message: error.message } });
    }
    await new Promise((done) => setTimeout(done, POLL_MS));
  }
  try {
    model = await props();
  } catch (error) {
    $("loading").hidden = true;
    failed(error, begin);
    return false;
  }
  $("loading").hidden = true;
  $("model").textContent = model.model_alias;
  showDefaults(model.default_generation_settings.params, model.chat);
  $("input").placeholder = model.chat ? "Message" : "Text to continue";
  $("input-label").textContent = $("input").placeholder;
  $("send").textContent = model.chat ? "Send" : "Continue";
  show();
  return true;
}

function loading(state) {
  $("loading").hidden = false;
  const { what, done, size } = state.progress ?? {};
  const doing = what && `${what[0].toUpperCase()}${what.slice(1)} the model`;
  const words = doing || (state.error?.message ?? "Loading");
  $("loading-text").textContent = size ? `${words}: ${Math.floor((100 * done) / size)} %` : words;
  if (size) $("loading-bar").value = done / size;
  else $("loading-bar").removeAttribute("value");
}

// ---- the view

function show() {
  const plain = model !== null && !model.chat;
  const views = conversation.messages.map((message, i) => messageView(message, {
    plain,
    actions: running ? {} : {
      ...(plain || message.role === "user" ? { edit: (text) => edit(i, text) } : {}),
      ...(i === conversation.messages.length - 1 && i > 0 ? { regenerate } : {}),
    },
  }));
  view = views.at(-1) ?? null;
  $("log").replaceChildren(...views.map((v) => v.node));
  $("empty").hidden = model === null || views.length > 0;
  $("empty").textContent = plain
    ? "This model continues text: give it a beginning, such as “Once upon a time”."
    : "Ask something.";
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = model === null;
  $("log").setAttribute("aria-busy", String(running !== null));
  showTitle();
  toEnd(true);
}

function showTitle() {
  const title = history.titleOf(conversation);
  $("title").textContent = title;
  document.title = conversation.messages.length ? `${title} – Thermocline` : "Thermocline";
  shelf(conversation.id);
}

/** Scrolls along with an answer, unless the reader has scrolled away from its end. */
function toEnd(always) {
  const area = $("scroll");
  const below = area.scrollHeight - area.scrollTop - area.clientHeight;
  if (always || below < 120) area.scrollTop = area.scrollHeight;
}

function notice(text, retry) {
  $("notice").hidden = text === null;
  $("notice-text").textContent = text ?? "";
  $("retry").hidden = !retry;
  $("retry").onclick = () => {
    notice(null);
    retry();
  };
  $("key-form").hidden = true;
}

/** Shows an error in one line, with a way to retry; asks for a missing key. */
function failed(error, retry) {
  if (!(error instanceof ApiError)) console.error(error);
  notice(error.message, error.status === 401 ? null : retry);
  if (error.status !== 401) return;
  $("key-form").hidden = false;
  $("key-form").onsubmit = (event) => {
    event.preventDefault();
    useKey($("key").value.trim());
    $("key").value = "";
    notice(null);
    retry();
  };
  $("key").focus();
}

function keep() {
  conversation.updated = Date.now();
  const kept = history.save(conversation);
  if (!kept) notice("This browser's storage is full: export this conversation to keep it.");
  history.remember("open", conversation.id);
}

// ---- answers

function request() {
  const messages = conversation.messages.slice(0, -1);
  if (!model.chat) {
    const prompt = messages.map((m) => m.content).join("");
    return ["/v1/completions", { prompt, ...sampling() }];
  }
  const system = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  const said = messages.map(({ role, content }) => ({ role, content }));
  return ["/v1/chat/completions", { messages: [...system, ...said], ...sampling() }];
}

/** Answers the conversation. `before`: an earlier answer, which stays if no new one comes. */
async function answer(before = null) {
  const message = { role: "assistant", content: "", thought: "", finish: null, timings: null };
  conversation.messages.push(message);
  notice(null);
  running = new AbortController();
  show();
  $("said").textContent = "Answering";
  const unwatch = strip.watch();
  try {
    await receive(message, running.signal);
    $("said").textContent = `Answer: ${message.content}`;
  } catch (error) {
    message.finish = error.name === "AbortError" ? "stopped" : "broken";
    if (!message.content && !message.thought) {
      conversation.messages.pop();
      if (before) conversation.messages.push(before);
    }
    $("said").textContent = "The answer has ended early";
    if (error.name !== "AbortError") failed(error, async () => await begin() && regenerate());
  } finally {
    unwatch();
    running = null;
    keep();
    show();
    if (document.activeElement === document.body) $("input").focus(); // "Stop" had it, and is hidden now
  }
}

async function receive(message, signal) {
  let saved = Date.now();
  let drawn = 0;
  const draw = () => {
    drawn = 0;
    view?.show();
    toEnd(false);
  };
  try {
    for await (const piece of generate(...request(), signal)) {
      message.content += piece.text;
      message.thought += piece.thought;
      message.finish = piece.finish ?? message.finish;
      message.timings = piece.timings ?? message.timings;
      drawn ||= requestAnimationFrame(draw);
      if (Date.now() - saved > SAVE_EVERY_MS) {
        saved = Date.now();
        history.save(conversation);
      }
    }
  } finally {
    cancelAnimationFrame(drawn);
  }
}

function send() {
  if (running || model === null) return;
  const given = $("input").value;
  const text = model.chat ? given.trim() : continued(given);
  if (!text && (model.chat || !conversation.messages.length)) return;
  if (text) conversation.messages.push({ role: "user", content: text });
  $("input").value = "";
  fitInput();
  answer();
}

/** Returns a space if two pieces of text would become one word. */
function continued(given) {
  const before = conversation.messages.at(-1)?.content ?? "";
  return given && /\S$/.test(before) && /^[\p{L}\p{N}]/u.test(given) ? ` ${given}` : given;
}

function regenerate() {
  if (running) return;
  answer(conversation.messages.at(-1)?.role === "assistant" ? conversation.messages.pop() : null);
}

/** Continues from a message as it is now, and drops the messages after it. */
function edit(index, text) {
  const { role } = conversation.messages[index];
  conversation.messages = [...conversation.messages.slice(0, index), { role, content: text }];
  answer();
}

function stop() {
  running?.abort();
}

// ---- conversations

function open(next) {
  stop();
  // Text of a stopped answer that still arrives belongs to the previous conversation.
  whenIdle(() => {
    conversation = next;
    history.remember("open", conversation.id);
    notice(null);
    show();
    $("input").focus();
  });
}

function whenIdle(then) {
  if (running) setTimeout(() => whenIdle(then), 10);
  else then();
}

const shelf = bindShelf({
  open: (id) => open(history.load(id) ?? history.create()),
  fresh: () => open({ ...history.create(), system: conversation.system }),
  remove: (id) => {
    if (id !== conversation.id) {
      history.remove(id);
      return showTitle();
    }
    stop();
    whenIdle(() => { // a stopped answer is saved once more
      history.remove(id);
      open(history.create());
    });
  },
  renamed: (now) => {
    if (now?.id === conversation.id) conversation.title = now.title;
    showTitle();
  },
});

/** Another tab continued or deleted this conversation; this tab must not undo that. */
history.watch((id) => {
  if (id !== conversation.id || running || document.querySelector(".editor")) return showTitle();
  conversation = history.load(id) ?? history.create();
  show();
});

// ---- the composer

function fitInput() {
  const area = $("input");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}

$("input").oninput = fitInput;
$("input").onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};
$("composer").onsubmit = (event) => {
  event.preventDefault();
  send();
};
$("stop").onclick = stop;
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
window.addEventListener("pagehide", () => running && history.save(conversation));

bindTheme(strip.draw);
bindSettings({
  get: () => conversation.system,
  set: (text) => {
    conversation.system = text;
    if (conversation.messages.length) keep();
  },
});
show();
begin();
